"""Nuclear norms (sums of singular values) of many matrices, and a memo for weights that many networks share.

||A||_* = sum_i sqrt(lambda_i), lambda the eigenvalues of the smaller of A^T A and A A^T. Squaring loses half the
digits, so the product is taken in float64 of the upcast matrix: as exact as float32 singular values, also for gradients
of low rank, and faster. GPUs are slow at float64 and take singular values in float32 instead.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock

import torch
from torch import Tensor

_KEPT = 4096  # entries of a memo; a whole space of the largest supernets has 126 slices


def nuclear_norms(matrices: Sequence[Tensor]) -> Tensor:
    """||A||_* of every matrix (rows, columns), float64 (n,) on the matrices' device; NaN where one is not finite.

    The result for a matrix depends neither on the others nor on the number of threads.
    """
    if not matrices:
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    assert all(m.ndim == 2 for m in matrices), "nuclear norms are of matrices"
    with torch.no_grad():
        if matrices[0].device.type == "cpu":
            return torch.stack(_in_threads(matrices))
        return _by_shape(matrices)


def _from_gram(matrix: Tensor) -> Tensor:
    a = matrix.double()
    gram = a.t() @ a if a.shape[0] >= a.shape[1] else a @ a.t()
    if not gram.isfinite().all():  # at which the eigensolver raises
        return gram.new_full((), torch.nan)
    # Eigenvalues of a rank-deficient Gram matrix come out as tiny negative numbers.
    return torch.linalg.eigvalsh(gram).clamp_min(0).sqrt().sum()


def _in_threads(matrices: Sequence[Tensor]) -> list[Tensor]:
    """One matrix a thread: LAPACK releases the GIL but hardly uses threads itself for matrices of a few hundred."""
    threads = torch.get_num_threads()
    if threads == 1:
        return [_from_gram(m) for m in matrices]
    try:
        with ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return list(pool.map(_from_gram, matrices))
    finally:
        # The number is each thread's own, but threads yet to come start with what was set last.
        torch.set_num_threads(threads)


def _by_shape(matrices: Sequence[Tensor]) -> Tensor:
    shapes: dict[torch.Size, list[int]] = {}
    for i, m in enumerate(matrices):
        shapes.setdefault(m.shape, []).append(i)
    norms = torch.zeros(len(matrices), dtype=torch.float64, device=matrices[0].device)
    for places in shapes.values():
        stack = torch.stack([matrices[i].float() for i in places])
        finite = stack.isfinite().all(-1).all(-1)
        found = torch.linalg.svdvals(torch.where(finite[:, None, None], stack, 0.0)).sum(-1, dtype=torch.float64)
        norms[torch.tensor(places, device=norms.device)] = torch.where(finite, found, torch.nan)
    return norms


class NormCache:
    """Nuclear norms of matrices met before: sub-networks of one supernet share most of their weight slices.

    An entry is found by a layer's name, the shape, and the sum and the Euclidean norm of the values in float64, so
    other weights under the same name are another entry, and a cache may serve any networks. The oldest entries leave.
    """

    def __init__(self) -> None:
        self._norms: OrderedDict[tuple[object, ...], float] = OrderedDict()
        self._lock = Lock()  # of threads that score networks side by side
        self.computed = 0

    def __len__(self) -> int:
        return len(self._norms)

    def norms(self, names: Sequence[str], matrices: Sequence[Tensor]) -> Tensor:
        """`nuclear_norms` of `matrices`, the weights of the layers called `names`."""
        if not matrices:
            return nuclear_norms(matrices)
        prints = torch.stack([f(m) for m in matrices for f in (_sum, _length)]).reshape(-1, 2).tolist()
        keys = [(name, *m.shape, *own) for name, m, own in zip(names, matrices, prints, strict=True)]
        with self._lock:
            known = {key: self._norms[key] for key in keys if key in self._norms}
        new = {key: m for key, m in zip(keys, matrices, strict=True) if key not in known}
        self.computed += len(new)
        found = nuclear_norms(list(new.values())).tolist() if new else []
        with self._lock:
            self._norms.update({**known, **dict(zip(new, found, strict=True))})
            for key in keys:
                self._norms.move_to_end(key)
            values = [self._norms[key] for key in keys]
            while len(self._norms) > _KEPT:
                self._norms.popitem(last=False)
        return torch.tensor(values, dtype=torch.float64, device=matrices[0].device)


def _sum(matrix: Tensor) -> Tensor:
    return matrix.sum(dtype=torch.float64)


def _length(matrix: Tensor) -> Tensor:
    return torch.linalg.vector_norm(matrix, dtype=torch.float64)
