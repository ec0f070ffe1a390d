"""What TensorBoard reads, read back by the protocol buffers and checksums of another library."""

import struct
from collections.abc import Iterator

from tensorboardX import crc32c as theirs
from tensorboardX.proto import event_pb2 as protos

from sdp.train.callbacks.tensorboard import crc32c, event, numbers, record


def records(data: bytes) -> Iterator[bytes]:
    """The contents of TFRecords, with their checksums checked."""
    at = 0
    while at < len(data):
        (length,) = struct.unpack_from("<Q", data, at)
        header, content = data[at : at + 8], data[at + 12 : at + 12 + length]
        for told, of in ((data[at + 8 : at + 12], header), (data[at + 12 + length : at + 16 + length], content)):
            crc = theirs.crc32c(of)
            assert struct.unpack("<I", told)[0] == ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
        yield content
        at += 16 + length


def test_the_checksum_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the catalogue's check value


def test_events_are_what_they_say() -> None:
    data = b"".join(
        map(
            record,
            [
                event(1000.5, 0, version="brain.Event:2"),
                event(1001.0, 301, start=True),
                event(1002.25, 550_000, scalars={"loss": 0.125, "time/data": -3.5}),
            ],
        )
    )
    first, start, last = [protos.Event.FromString(content) for content in records(data)]
    assert (first.wall_time, first.file_version) == (1000.5, "brain.Event:2")
    assert (start.step, start.session_log.status) == (301, protos.SessionLog.START)
    assert (last.wall_time, last.step) == (1002.25, 550_000)
    assert {value.tag: value.simple_value for value in last.summary.value} == {"loss": 0.125, "time/data": -3.5}


def test_numbers_are_taken_out_of_groups_and_nothing_else_is_a_number() -> None:
    line = {"step": 3, "loss": None, "time": {"data": 0.5}, "slowest": {"rank": 1, "host": "a"}, "ok": True, "lr": 1}
    assert numbers(line) == {"time/data": 0.5, "slowest/rank": 1.0, "lr": 1.0}
