"""Rank 1 fails while rank 0 waits for it."""

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record


@record
def main():
    dist.init_process_group("gloo")
    if dist.get_rank() == 1:
        raise ValueError("no class has number 12")
    dist.barrier()


if __name__ == "__main__":
    main()
