"""What `torch.distributed.run` documents for workers. Ports and ids differ from job to job."""

import os

from result import tell

NAMES = """RANK LOCAL_RANK GROUP_RANK ROLE_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_WORLD_SIZE ROLE_WORLD_SIZE ROLE_NAME
TORCHELASTIC_RESTART_COUNT TORCHELASTIC_MAX_RESTARTS TORCHELASTIC_USE_AGENT_STORE TORCHELASTIC_SIGNALS_TO_HANDLE
TORCH_NCCL_ASYNC_ERROR_HANDLING OMP_NUM_THREADS""".split()

values = [os.environ.get(name) for name in NAMES]
set_up = all(os.environ.get(name) for name in ["MASTER_ADDR", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE"])
tell("rank", *values, set_up, 0 < int(os.environ["MASTER_PORT"]) < 65536)
