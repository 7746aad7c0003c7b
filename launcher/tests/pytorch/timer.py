"""All ranks are in time once; then rank 1 is not.

usage: timer.py FILE     FILE: not there yet
"""

import os
import sys
import time
from pathlib import Path

import torch.distributed.elastic.timer as timer

rank_0_was_in_time = Path(sys.argv[1])
timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=60):
    pass
with timer.expires(after=60, scope="first step"):
    print("in time", flush=True)
if os.environ["RANK"] == "0":
    rank_0_was_in_time.touch()
else:
    while not rank_0_was_in_time.exists():
        time.sleep(0.01)
    with timer.expires(after=0.5, scope="second step"):
        time.sleep(1000)
time.sleep(1000)
