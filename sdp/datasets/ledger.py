"""The training ledger: the addresses that each epoch has consumed, in a form that merges and stays small."""

import json
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from pyroaring import BitMap64

from sdp.datasets.records import Whole, parse, reading
from sdp.datasets.units import Addresses

_MAGIC = b"SDPLEDG1"
NAME = "ledger.roaring"
"""The file's name in a checkpoint."""
_RANGE_BITS = 40
"""Bits of the address range that each dataset of a mixture gets."""


def address_offset(dataset: int) -> int:
    """Return the number that is added to the addresses of a run's n-th dataset, 0 for the first."""
    return dataset << _RANGE_BITS


@dataclass(frozen=True, slots=True)
class _Header:
    """The ledger's epochs, and the size in bytes of each one's bitmap."""

    epochs: tuple[Whole, ...]
    sizes: tuple[Whole, ...]


class Ledger:
    """Consumed addresses by epoch. Workers' ledgers are merged by union, so their order does not matter."""

    def __init__(self) -> None:
        self._epochs: defaultdict[int, BitMap64] = defaultdict(BitMap64)

    def add(self, epoch: int, rows: Addresses) -> None:
        """Record some addresses."""
        self._epochs[epoch].update(np.ascontiguousarray(rows, dtype=np.uint64))

    def merge(self, others: Iterable["Ledger"]) -> None:
        """Add what other ledgers have recorded."""
        for other in others:
            for epoch, rows in other._epochs.items():
                self._epochs[epoch].update(rows)

    def consumed(self, epoch: int) -> int:
        """Return the number of addresses that an epoch has consumed."""
        return len(self._epochs.get(epoch, ()))

    def rows(self, epoch: int) -> BitMap64:
        """Return the consumed addresses of an epoch; do not change them."""
        return self._epochs.get(epoch, BitMap64())

    def epochs(self) -> list[int]:
        return sorted(self._epochs)

    def epochs_of(self, row: int) -> list[int]:
        """Return the epochs that have consumed an address."""
        return [epoch for epoch in self.epochs() if row in self._epochs[epoch]]

    def to_bytes(self) -> bytes:
        """Serialise the ledger: a header, then a portable roaring bitmap for each epoch."""
        blobs = []
        for epoch in self.epochs():
            bitmap = BitMap64(self._epochs[epoch])
            bitmap.run_optimize()
            blobs.append(bitmap.serialize())
        header = json.dumps({"epochs": self.epochs(), "sizes": [len(b) for b in blobs]}).encode()
        return b"".join([_MAGIC, len(header).to_bytes(4, "little"), header, *blobs])

    @staticmethod
    def from_bytes(data: bytes, where: str = "ledger") -> "Ledger":
        with reading(where, "use another checkpoint", "not a ledger"):
            if data[:8] != _MAGIC:
                raise ValueError("wrong first bytes")
            length = int.from_bytes(data[8:12], "little")
            header = parse(_Header, data[12 : 12 + length])
            at, ledger = 12 + length, Ledger()
            for epoch, size in zip(header.epochs, header.sizes, strict=True):
                if at + size > len(data):
                    raise ValueError(f"{len(data)} bytes are too few")
                ledger._epochs[epoch] = BitMap64.deserialize(data[at : at + size])
                at += size
        return ledger
