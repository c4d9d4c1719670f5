"""A program that loses its device on purpose. Each call must report the loss, and it must exit."""

from kvstow.transfer import (
    READY,
    BlockLayout,
    CudaError,
    CudaLink,
    CudaMover,
    HostArena,
    Region,
)
from kvstow.transfer.cuda.runtime import cuda_runtime

ILLEGAL = BlockLayout(8, (Region(4096, 4096, 4096),), device=0)


def main() -> None:
    """Gather from an address where nothing is mapped."""
    runtime = cuda_runtime(0)
    link = CudaLink(runtime, staging_bytes=1 << 20)
    with HostArena(8, 4096) as arena, CudaMover(ILLEGAL, arena, link=link, path="packed") as mover:
        for slot in range(3):
            try:
                mover.store([1], [slot], after=READY).wait(60)
            except CudaError as error:
                assert error.is_fatal, error
            else:
                raise AssertionError("a store read an illegal address")
        assert runtime.lost is not None
        try:
            mover.load([1], [1], after=READY)
        except CudaError as error:
            assert error.is_fatal
        else:
            raise AssertionError("a lost device accepted a job")
    print("the loss was reported")


if __name__ == "__main__":
    main()
