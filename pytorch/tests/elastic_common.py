"""What is common to trainings whose processes are killed."""

import os
import random
import signal
import threading
import time

import torch


def kill_within(seconds):
    """Kills this process at a random moment."""

    def kill():
        time.sleep(random.uniform(0, seconds))
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=kill, daemon=True).start()


def gradient_at(weights):
    """Multiples of 3, of which the mean over one, two or three ranks is exact. They depend on the weights."""
    return 3 * torch.floor(weights.detach() * 1024 % 11 - 5)
