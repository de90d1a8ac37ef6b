"""One order of summation for a launch in all buckets, so that a row's bits don't depend on what runs beside it.

    linear [4096, 14336]      decode-1                       mixed-2048
      fastest                 few.16.s2        28 us         many.128x256.m2   365 us
      order linear_many.s6    many.256x32.s6   31 us         many.256x128.s6   420 us
      order linear_many.s1    many.128x16      55 us         many.128x256.m2   365 us

A kernel by itself gives a row the same bits whatever the rest of the step holds, unless its `row_order` is None, and
kernels of one order agree. In each bucket an order's fastest kernel counts by how much longer it takes than the
fastest of all; buckets count alike, and the order with the least sum is taken.
"""

from collections.abc import Sequence

from castiron.builder.plan.tactics import row_order
from castiron.models.kernel_spec import KernelSpec

BucketTimes = Sequence[
    tuple[KernelSpec, float]
]  # kernels that can compute a launch in a bucket, and their µs


def choose_order(buckets: Sequence[BucketTimes]) -> str | None:
    """The order that costs least over all buckets, the first of equals; None if none has a kernel in every one."""
    sums: dict[str, float] = {}
    for number, times in enumerate(buckets):
        best = min(us for _, us in times)
        fastest: dict[str, float] = {}
        for spec, us in times:
            order = row_order(spec)
            if order is not None:
                fastest[order] = min(us, fastest.get(order, us))
        candidates = fastest if number == 0 else sums.keys() & fastest.keys()
        sums = {
            order: sums.get(order, 0.0) + (us / best if best else 1.0)
            for order, us in fastest.items()
            if order in candidates
        }
    return min(sums, key=lambda order: sums[order], default=None)
