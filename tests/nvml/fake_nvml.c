/* A libnvidia-ml.so.1 that tells what a text file says, for tests: values, errors and hangs, of GPUs that do not exist.
 *
 * The file is named by FAKE_NVML_SCENARIO and looked at again in every call, so that a test can change it (by renaming
 * another over it) while a program runs. A line is a key, a space, and the rest:
 *
 *   gpus 8                                     how many there are
 *   gpu.3.power_mw 250000                      a value of one GPU; `gpu.*.power_mw` is for those without their own
 *   error.nvmlDeviceGetPowerUsage 999          what that call returns, of every GPU; `gpu.3.error.…` of one
 *   hang.nvmlDeviceGetPowerUsage 3.5           seconds for which it does not return, or until the line is gone
 *   gpu.*.field.82 61                          a value of nvmlDeviceGetFieldValues; `gpu.*.field.82.error 999` an error
 *   gpu.3.gpm.5 61.5                           a percentage of nvmlGpmMetricsGet, on a GPU with a line `gpu.3.gpm 1`
 *   gpu.0.process.0 C 4242 1073741824          kind (C, G, M), pid, bytes or "-"
 *   xid.0 3 79                                 an event: GPU and XID; each is told once, in order
 *
 * What has no line is not supported. Names are those of the calls without _v2 and _v3.
 */
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

#define OK 0
#define UNINITIALIZED 1
#define INVALID_ARGUMENT 2
#define NOT_SUPPORTED 3
#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7
#define DRIVER_NOT_LOADED 9
#define TIMEOUT 10

#define GPUS 64
#define NONE 0xFFFFFFFFu
#define TEXT (1 << 20)

typedef unsigned int uint;
typedef unsigned long long ull;
typedef struct { int gpu; } Device;

static Device gpus[GPUS];
static int opened;
static int next_event;
static ull registered; /* a bit for each GPU */

/* ---- the scenario ---- */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char text[TEXT];
static struct stat seen;

static int load(void) {
    const char *path = getenv("FAKE_NVML_SCENARIO");
    struct stat now;
    if (!path || stat(path, &now) != 0) return 0;
    if (now.st_ino == seen.st_ino && now.st_size == seen.st_size && now.st_mtim.tv_sec == seen.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec)
        return 1;
    FILE *file = fopen(path, "r");
    if (!file) return 0;
    size_t length = fread(text + 1, 1, TEXT - 2, file);
    fclose(file);
    text[0] = '\n'; /* so that every line begins after one */
    text[length + 1] = 0;
    seen = now;
    return 1;
}

/* The rest of the key's line, copied into value; 0 if there is none. */
static int lookup(char *value, size_t size, const char *format, ...) {
    char key[160];
    key[0] = '\n';
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(key + 1, sizeof key - 2, format, arguments);
    va_end(arguments);
    strcat(key, " ");
    pthread_mutex_lock(&lock);
    const char *line = load() ? strstr(text, key) : NULL;
    int found = line != NULL;
    if (found) {
        line += strlen(key);
        size_t length = strcspn(line, "\n");
        if (length >= size) length = size - 1;
        memcpy(value, line, length);
        value[length] = 0;
    }
    pthread_mutex_unlock(&lock);
    return found;
}

static int of_gpu(char *value, size_t size, int gpu, const char *name) {
    return lookup(value, size, "gpu.%d.%s", gpu, name) || lookup(value, size, "gpu.*.%s", name);
}

static double hanging(int gpu, const char *call) {
    char value[64], name[96];
    snprintf(name, sizeof name, "hang.%s", call);
    if ((gpu >= 0 && of_gpu(value, sizeof value, gpu, name)) || lookup(value, sizeof value, "%s", name)) return atof(value);
    return 0;
}

static void nap(double seconds) {
    struct timespec time = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    nanosleep(&time, NULL);
}

/* What every call does first: hang and fail as it was told to. gpu -1: the call is about none. */
static int enter(int gpu, const char *call) {
    double waited = 0;
    while (hanging(gpu, call) > waited) {
        nap(0.01);
        waited += 0.01;
    }
    char value[64], name[96];
    snprintf(name, sizeof name, "error.%s", call);
    if ((gpu >= 0 && of_gpu(value, sizeof value, gpu, name)) || lookup(value, sizeof value, "%s", name)) return atoi(value);
    return opened || strcmp(call, "nvmlInit") == 0 ? OK : UNINITIALIZED;
}

#define ENTER(device, call)                                                                                            \
    do {                                                                                                               \
        int code_ = enter((device)->gpu, call);                                                                        \
        if (code_) return code_;                                                                                       \
    } while (0)

static int number(ull *value, const Device *device, const char *name) {
    char line[64];
    if (!of_gpu(line, sizeof line, device->gpu, name)) return NOT_SUPPORTED;
    *value = strtoull(line, NULL, 10);
    return OK;
}

/* Most calls: one number of one GPU. */
static int one(const Device *device, const char *call, const char *name, uint *value) {
    ENTER(device, call);
    ull wide;
    int code = number(&wide, device, name);
    if (code == OK) *value = (uint)wide;
    return code;
}

#define ONE(call, name)                                                                                                \
    int call(const Device *device, uint *value) { return one(device, #call, name, value); }

static int words(const Device *device, const char *call, const char *name, char *value, uint size) {
    ENTER(device, call);
    return of_gpu(value, size, device->gpu, name) ? OK : NOT_SUPPORTED;
}

/* ---- the driver ---- */

int nvmlInitWithFlags(uint flags) {
    (void)flags;
    char value[16];
    int code = enter(-1, "nvmlInit");
    if (code) return code;
    if (!lookup(value, sizeof value, "gpus")) return DRIVER_NOT_LOADED;
    for (int gpu = 0; gpu < GPUS; gpu++) gpus[gpu] = (Device){gpu};
    opened = 1;
    return OK;
}

/* As a library's own cleanup may hang: `hang.exit`. */
__attribute__((destructor)) static void end(void) { enter(-1, "exit"); }

int nvmlShutdown(void) {
    opened = 0;
    return OK;
}

const char *nvmlErrorString(int code) {
    static _Thread_local char line[32];
    snprintf(line, sizeof line, "fake error %d", code);
    return line;
}

static int of_driver(const char *call, const char *name, char *value, uint size) {
    int code = enter(-1, call);
    if (code) return code;
    return lookup(value, size, "%s", name) ? OK : NOT_SUPPORTED;
}

int nvmlSystemGetDriverVersion(char *value, uint size) {
    return of_driver("nvmlSystemGetDriverVersion", "driver", value, size);
}

int nvmlSystemGetCudaDriverVersion_v2(int *value) {
    char line[16];
    int code = of_driver("nvmlSystemGetCudaDriverVersion", "cuda", line, sizeof line);
    if (code == OK) *value = atoi(line);
    return code;
}

int nvmlDeviceGetCount_v2(uint *value) {
    char line[16];
    int code = of_driver("nvmlDeviceGetCount", "gpus", line, sizeof line);
    if (code == OK) *value = (uint)atoi(line);
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(uint index, Device **device) {
    uint count;
    int code = enter((int)index, "nvmlDeviceGetHandleByIndex");
    if (code) return code;
    if (nvmlDeviceGetCount_v2(&count) != OK || index >= count || index >= GPUS) return INVALID_ARGUMENT;
    *device = &gpus[index];
    return OK;
}

/* ---- what a GPU is ---- */

int nvmlDeviceGetName(const Device *device, char *value, uint size) {
    return words(device, "nvmlDeviceGetName", "name", value, size);
}

int nvmlDeviceGetUUID(const Device *device, char *value, uint size) {
    return words(device, "nvmlDeviceGetUUID", "uuid", value, size);
}

/* ---- utilization and memory ---- */

int nvmlDeviceGetUtilizationRates(const Device *device, uint value[2]) {
    int code = one(device, "nvmlDeviceGetUtilizationRates", "utilization", &value[0]);
    return code ? code : one(device, "nvmlDeviceGetUtilizationRates", "memory_utilization", &value[1]);
}

static int memory(const Device *device, ull *total, ull *used, ull *reserved) {
    ENTER(device, "nvmlDeviceGetMemoryInfo");
    *reserved = 0;
    int code = number(total, device, "memory_total");
    number(reserved, device, "memory_reserved");
    return code ? code : number(used, device, "memory_used");
}

typedef struct { uint version; ull total, reserved, free, used; } MemoryV2;

int nvmlDeviceGetMemoryInfo_v2(const Device *device, MemoryV2 *value) {
    int code = memory(device, &value->total, &value->used, &value->reserved);
    value->free = value->total - value->used - value->reserved;
    return code;
}

/* ---- power, heat, clocks ---- */

ONE(nvmlDeviceGetPowerUsage, "power_mw")
ONE(nvmlDeviceGetEnforcedPowerLimit, "power_limit_mw")

int nvmlDeviceGetTotalEnergyConsumption(const Device *device, ull *value) {
    ENTER(device, "nvmlDeviceGetTotalEnergyConsumption");
    return number(value, device, "energy_mj");
}

static int indexed(const Device *device, const char *call, const char *name, uint index, ull *value) {
    ENTER(device, call);
    char full[64];
    snprintf(full, sizeof full, "%s.%u", name, index);
    return number(value, device, full);
}

#define INDEXED(call, name)                                                                                            \
    int call(const Device *device, uint index, uint *value) {                                                          \
        ull wide;                                                                                                      \
        int code = indexed(device, #call, name, index, &wide);                                                         \
        if (code == OK) *value = (uint)wide;                                                                           \
        return code;                                                                                                   \
    }
INDEXED(nvmlDeviceGetTemperatureThreshold, "temperature_limit")
INDEXED(nvmlDeviceGetClockInfo, "clock_mhz")
INDEXED(nvmlDeviceGetMaxClockInfo, "clock_max_mhz")
INDEXED(nvmlDeviceGetNvLinkState, "nvlink")

int nvmlDeviceGetTemperature(const Device *device, uint sensor, uint *value) {
    (void)sensor;
    return one(device, "nvmlDeviceGetTemperature", "temperature", value);
}

int nvmlDeviceGetCurrentClocksThrottleReasons(const Device *device, ull *value) {
    ENTER(device, "nvmlDeviceGetCurrentClocksThrottleReasons");
    return number(value, device, "throttle_reasons");
}

/* ---- links ---- */

int nvmlDeviceGetPcieThroughput(const Device *device, uint counter, uint *value) {
    ull block = 20; /* as long as the real one measures */
    number(&block, device, "pcie_block_ms");
    nap((double)block / 1000);
    return one(device, "nvmlDeviceGetPcieThroughput", counter ? "pcie_receive_kb" : "pcie_transmit_kb", value);
}

ONE(nvmlDeviceGetPcieReplayCounter, "pcie_replays")
ONE(nvmlDeviceGetCurrPcieLinkWidth, "pcie_width")
ONE(nvmlDeviceGetMaxPcieLinkWidth, "pcie_width_max")

typedef struct { uint field, scope; long long timestamp, latency; uint type; int code; ull value; } Field;

int nvmlDeviceGetFieldValues(const Device *device, int count, Field *fields) {
    ENTER(device, "nvmlDeviceGetFieldValues");
    for (int i = 0; i < count; i++) {
        char name[32];
        ull code;
        snprintf(name, sizeof name, "field.%u.error", fields[i].field);
        fields[i].type = 3; /* unsigned long long */
        if (number(&code, device, name) == OK) {
            fields[i].code = (int)code;
            continue;
        }
        snprintf(name, sizeof name, "field.%u", fields[i].field);
        fields[i].code = number(&fields[i].value, device, name);
    }
    return OK;
}

/* ---- activity between two samples ---- */

typedef struct { int gpu, number; } GpmSample;
typedef struct { uint version, supported; } GpmSupport;
typedef struct { uint metric; int code; double value; const char *names[3]; } GpmMetric;
typedef struct { uint version, count; GpmSample *first, *second; GpmMetric metrics[]; } GpmMetrics;

static int gpm_samples, gpm_taken;

int nvmlGpmQueryDeviceSupport(const Device *device, GpmSupport *value) {
    ull supported = 0;
    ENTER(device, "nvmlGpmQueryDeviceSupport");
    number(&supported, device, "gpm");
    value->supported = (uint)supported;
    return value->version == 1 ? OK : INVALID_ARGUMENT;
}

int nvmlGpmSampleAlloc(GpmSample **sample) {
    if (__atomic_add_fetch(&gpm_samples, 1, __ATOMIC_SEQ_CST) > 2 * GPUS) return INSUFFICIENT_SIZE; /* they leak */
    *sample = calloc(1, sizeof **sample);
    return OK;
}

int nvmlGpmSampleFree(GpmSample *sample) {
    __atomic_sub_fetch(&gpm_samples, 1, __ATOMIC_SEQ_CST);
    free(sample);
    return OK;
}

int nvmlGpmSampleGet(const Device *device, GpmSample *sample) {
    ENTER(device, "nvmlGpmSampleGet");
    *sample = (GpmSample){device->gpu, __atomic_add_fetch(&gpm_taken, 1, __ATOMIC_SEQ_CST)};
    return OK;
}

int nvmlGpmMetricsGet(GpmMetrics *asked) {
    if (asked->version != 1 || asked->first->gpu != asked->second->gpu || asked->first->number >= asked->second->number)
        return INVALID_ARGUMENT;
    ENTER(&gpus[asked->first->gpu], "nvmlGpmMetricsGet");
    for (uint i = 0; i < asked->count; i++) {
        char line[64], name[32];
        snprintf(name, sizeof name, "gpm.%u", asked->metrics[i].metric);
        asked->metrics[i].code = of_gpu(line, sizeof line, asked->first->gpu, name) ? OK : NOT_SUPPORTED;
        asked->metrics[i].value = atof(line);
    }
    return OK;
}

/* ---- faults ---- */

int nvmlDeviceGetTotalEccErrors(const Device *device, uint kind, uint since, ull *value) {
    return since ? NOT_SUPPORTED : indexed(device, "nvmlDeviceGetTotalEccErrors", "ecc_driver_load", kind, value);
}

int nvmlDeviceGetRemappedRows(const Device *device, uint *corrected, uint *uncorrected, uint *pending, uint *failed) {
    ENTER(device, "nvmlDeviceGetRemappedRows");
    char line[64];
    if (!of_gpu(line, sizeof line, device->gpu, "remapped")) return NOT_SUPPORTED;
    return sscanf(line, "%u %u %u %u", corrected, uncorrected, pending, failed) == 4 ? OK : INVALID_ARGUMENT;
}

/* ---- processes ---- */

typedef struct { uint pid; ull memory; uint gi, ci; } Process;

static int processes(const Device *device, const char *call, char wanted, uint *count, Process *room) {
    ENTER(device, call);
    uint found = 0;
    for (int place = 0;; place++) {
        char line[128], name[32], kind, bytes[32];
        uint pid;
        snprintf(name, sizeof name, "process.%d", place);
        if (!of_gpu(line, sizeof line, device->gpu, name)) break;
        if (sscanf(line, " %c %u %31s", &kind, &pid, bytes) < 3 || kind != wanted) continue;
        if (room && found < *count)
            room[found] = (Process){pid, bytes[0] == '-' ? ~0ull : strtoull(bytes, NULL, 10), NONE, NONE};
        found++;
    }
    int enough = room ? found <= *count : found == 0;
    *count = found;
    return enough ? OK : INSUFFICIENT_SIZE;
}

int nvmlDeviceGetComputeRunningProcesses_v3(const Device *device, uint *count, Process *room) {
    return processes(device, "nvmlDeviceGetComputeRunningProcesses", 'C', count, room);
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(const Device *device, uint *count, Process *room) {
    return processes(device, "nvmlDeviceGetGraphicsRunningProcesses", 'G', count, room);
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(const Device *device, uint *count, Process *room) {
    return processes(device, "nvmlDeviceGetMPSComputeRunningProcesses", 'M', count, room);
}

/* ---- events ---- */

typedef struct { Device *device; ull type, data; uint gi, ci; } Event;

int nvmlEventSetCreate(void **set) {
    int code = enter(-1, "nvmlEventSetCreate");
    *set = &registered;
    return code;
}

int nvmlEventSetFree(void *set) {
    (void)set;
    __atomic_store_n(&registered, 0, __ATOMIC_SEQ_CST);
    return OK;
}

/* A GPU that is lost takes along that its events are told. */
static void forget_lost(void) {
    char line[64];
    for (int gpu = 0; gpu < GPUS; gpu++)
        if (lookup(line, sizeof line, "gpu.%d.error.nvmlDeviceGetHandleByIndex", gpu))
            __atomic_fetch_and(&registered, ~(1ull << gpu), __ATOMIC_SEQ_CST);
}

int nvmlDeviceRegisterEvents(const Device *device, ull types, void *set) {
    (void)types, (void)set;
    ENTER(device, "nvmlDeviceRegisterEvents");
    __atomic_fetch_or(&registered, 1ull << device->gpu, __ATOMIC_SEQ_CST);
    return OK;
}

int nvmlEventSetWait_v2(void *set, Event *event, uint milliseconds) {
    (void)set;
    for (double waited = 0; waited * 1000 < milliseconds; waited += 0.01) {
        int gpu, xid;
        char line[64];
        int code = enter(-1, "nvmlEventSetWait");
        if (code) return code;
        if (lookup(line, sizeof line, "xid.%d", next_event) && sscanf(line, "%d %d", &gpu, &xid) == 2) {
            next_event++;
            if (registered & (1ull << gpu)) {
                *event = (Event){&gpus[gpu], 8, (ull)xid, NONE, NONE};
                return OK;
            }
        }
        forget_lost();
        nap(0.01);
    }
    return TIMEOUT;
}
