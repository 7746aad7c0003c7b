"""All ranks are in time once; then rank 1 is not."""

import os
import time

import torch.distributed.elastic.timer as timer

timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"]))
with timer.expires(after=60):
    pass
with timer.expires(after=60, scope="first step"):
    print("in time", flush=True)
if os.environ["RANK"] == "1":
    with timer.expires(after=0.5, scope="second step"):
        time.sleep(1000)
time.sleep(1000)
