import os
import sys

print("worker", os.environ["RANK"], os.environ["WORLD_SIZE"], "FLOW_STORE" in os.environ, sys.executable, *sys.argv[1:])
