"""When the main thread waits."""

import os
import sys
import threading
import time
from pathlib import Path

MAIN = threading.main_thread()


def when_main_waits(code, then):
    """Calls `then`, on another thread, when the main thread sleeps in a call of the function that has this code: at one place for many looks.
    Between two of them it would get Python's lock, if it slept only for that. What begins in a thread is not begun while that starts."""

    def look():
        seen, looks = None, 0
        while looks < 10:
            time.sleep(0.005)
            frame = sys._current_frames()[MAIN.ident]
            state = Path(f"/proc/self/task/{os.getpid()}/stat").read_text().rpartition(") ")[2][0]
            place, is_in_call, starts_thread = (id(frame), frame.f_lasti), False, False
            while frame is not None:
                is_in_call |= frame.f_code is code
                starts_thread |= frame.f_code is threading.Thread.start.__code__
                frame = frame.f_back
            is_waiting = is_in_call and not starts_thread and state == "S"
            looks = looks + 1 if is_waiting and place == seen else 0
            seen = place
        then()

    threading.Thread(target=look, daemon=True).start()
