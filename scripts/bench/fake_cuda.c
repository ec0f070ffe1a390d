/* A fake CUDA runtime of a node with eight GPUs, for LD_PRELOAD under FakeTensorMode.
 *
 * It implements the calls that torch makes before any kernel runs: devices and their properties, streams, events. Nothing is computed:
 * launches and copies return at once. It also has the few driver calls that torch makes by name.
 */
#include <stdlib.h>
#include <string.h>
#include <cuda.h>
#include <cuda_runtime_api.h>

#define GPUS 8
#define DONE(name, ...) cudaError_t name(__VA_ARGS__) { return cudaSuccess; }
#define HANDLE(name, type, ...) cudaError_t name(type *handle, ##__VA_ARGS__) { *handle = malloc(1); return cudaSuccess; }

static _Thread_local int current;

cudaError_t cudaGetDeviceCount(int *count) { *count = GPUS; return cudaSuccess; }
cudaError_t cudaGetDevice(int *device) { *device = current; return cudaSuccess; }
cudaError_t cudaSetDevice(int device) { current = device; return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int one, int other) { *can = 1; return cudaSuccess; }
cudaError_t cudaMemGetInfo(size_t *free, size_t *total) { *free = *total = 80ull << 30; return cudaSuccess; }

/* By SDP_FAKE_ARCH. From the CUDA C programming guide's table of compute capabilities, and NVIDIA's datasheets. */
static const struct { const char *name; int capability, memory_gb, processors, threads, shared_kb; } GPU[] = {
    {"NVIDIA A100-SXM4-80GB", 80, 80, 108, 2048, 164}, {"NVIDIA A10G", 86, 24, 80, 1536, 100}, {"NVIDIA H100 80GB HBM3", 90, 80, 132, 2048, 228},
};

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    const char *arch = getenv("SDP_FAKE_ARCH");
    int at = arch ? (atoi(arch) > 80) + (atoi(arch) > 86) : 0;
    memset(properties, 0, sizeof *properties);
    strcpy(properties->name, GPU[at].name);
    properties->major = GPU[at].capability / 10;
    properties->minor = GPU[at].capability % 10;
    properties->totalGlobalMem = (size_t)GPU[at].memory_gb << 30;
    properties->multiProcessorCount = GPU[at].processors;
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = GPU[at].threads;
    properties->regsPerBlock = properties->regsPerMultiprocessor = 65536;
    properties->sharedMemPerBlock = 48 << 10;
    properties->sharedMemPerBlockOptin = (GPU[at].shared_kb - 1) << 10;
    properties->sharedMemPerMultiprocessor = GPU[at].shared_kb << 10;
    properties->l2CacheSize = 40 << 20;
    properties->memoryBusWidth = 5120;
    properties->pciBusID = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
HANDLE(cudaStreamCreateWithPriority, cudaStream_t, unsigned flags, int priority)
HANDLE(cudaEventCreateWithFlags, cudaEvent_t, unsigned flags)
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **nodes, const cudaGraphEdgeData **edges, size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t one, cudaEvent_t other) { *milliseconds = 0; return cudaSuccess; }
DONE(cudaStreamQuery, cudaStream_t stream)
DONE(cudaStreamSynchronize, cudaStream_t stream)
DONE(cudaStreamWaitEvent, cudaStream_t stream, cudaEvent_t event, unsigned flags)
DONE(cudaThreadExchangeStreamCaptureMode, enum cudaStreamCaptureMode *mode)
DONE(cudaDeviceSynchronize, void)
DONE(cudaEventDestroy, cudaEvent_t event)
DONE(cudaEventRecord, cudaEvent_t event, cudaStream_t stream)
DONE(cudaEventRecordWithFlags, cudaEvent_t event, cudaStream_t stream, unsigned flags)
DONE(cudaEventQuery, cudaEvent_t event)
DONE(cudaEventSynchronize, cudaEvent_t event)
DONE(cudaGetLastError, void)
DONE(cudaPeekAtLastError, void)
DONE(cudaMemsetAsync, void *to, int value, size_t size, cudaStream_t stream)
DONE(cudaMemcpyAsync, void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream)
DONE(cudaLaunchKernel, const void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream)
DONE(cudaGetDriverEntryPointByVersion, const char *name, void **found, unsigned version, unsigned long long flags,
     enum cudaDriverEntryPointQueryResult *result)
cudaError_t cudaMalloc(void **to, size_t size) { *to = malloc(size); return cudaSuccess; }
cudaError_t cudaFree(void *at) { free(at); return cudaSuccess; }
cudaError_t cudaHostAlloc(void **to, size_t size, unsigned flags) { return cudaMalloc(to, size); }
cudaError_t cudaFreeHost(void *at) { return cudaFree(at); }

/* --- the driver calls of torch and Triton's launcher: modules load, and nothing is launched --- */
#define CALL(name, ...) CUresult name(__VA_ARGS__) { return CUDA_SUCCESS; }

CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return CUDA_SUCCESS; }
CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    struct cudaDeviceProp properties;
    cudaGetDeviceProperties(&properties, device);
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = properties.major; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = properties.minor; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = properties.sharedMemPerBlockOptin; break;
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_MULTIPROCESSOR: *value = properties.sharedMemPerMultiprocessor; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = properties.regsPerBlock; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = properties.multiProcessorCount; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = properties.warpSize; break;
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1410000; break;
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 1593000; break;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = properties.memoryBusWidth; break;
    default: *value = 0;
    }
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) { *flags = 0; *active = 1; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = current; return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CALL(cuCtxSetCurrent, CUcontext context)
CALL(cuCtxSetLimit, CUlimit limit, size_t value)
CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = malloc(1); return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) { *function = malloc(1); return CUDA_SUCCESS; }
CUresult cuModuleLoad(CUmodule *module, const char *path) { return cuModuleLoadData(module, path); }
CALL(cuModuleUnload, CUmodule module)
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}
CALL(cuFuncSetAttribute, CUfunction function, CUfunction_attribute attribute, int value)
CALL(cuFuncSetCacheConfig, CUfunction function, CUfunc_cache config)
CALL(cuPointerGetAttribute, void *value, CUpointer_attribute attribute, CUdeviceptr pointer)
CALL(cuStreamIsCapturing, CUstream stream, CUstreamCaptureStatus *status)
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "CUDA is not there"; return CUDA_SUCCESS; }
