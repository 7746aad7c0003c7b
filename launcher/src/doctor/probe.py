"""What only Python can tell, as JSON: flow-launch doctor runs this with `python3 -c`.

arguments: python | torch | libraries FILE...
"""

import ctypes
import importlib.util
import json
import os
import sys

# What lies in the current folder is not what programs import.
sys.path[:] = filter(None, sys.path)


def python():
    """Its version, and the folder of its torch, which is not imported."""
    spec = importlib.util.find_spec("torch")
    folders = (spec and spec.submodule_search_locations) or [None]
    return {"version": sys.version.split()[0], "executable": sys.executable, "torch": folders[0]}


def torch():
    """PyTorch and flow_torch, imported. The error of one is its value."""
    found = {"torch": None, "cuda": None, "flow_torch": None}
    if importlib.util.find_spec("torch") is None:
        return found
    # It would import flow_torch, whose errors are then PyTorch's.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    try:
        import torch
    except Exception as error:
        return {**found, "torch_error": said(error)}
    found["torch"], found["cuda"] = torch.__version__, torch.version.cuda
    if importlib.util.find_spec("flow_torch") is not None:
        try:
            import flow_torch
            from flow_torch import extension

            if not flow_torch._is_supported:
                raise ImportError("flow_torch needs PyTorch 2.11 or newer")
            found["flow_torch"] = extension.origin()
        except Exception as error:
            found["flow_torch_error"] = said(error)
    return found


def libraries(*candidates):
    """The driver's CUDA version, and the first of these files that is NCCL, with the reasons against those before it."""
    found = {"cuda": None, "nccl": None, "refused": []}
    try:
        driver = ctypes.CDLL("libcuda.so.1")
        code, version = driver.cuInit(0), ctypes.c_int()
        driver.cuDriverGetVersion(ctypes.byref(version))
        found["cuda"] = f"{version.value // 1000}.{version.value % 1000 // 10}"
        if code:
            found["cuda_error"] = f"cuInit ends with error {code}"
    except (OSError, AttributeError) as error:
        found["cuda_error"] = said(error)
    for name in candidates:
        try:
            version = ctypes.c_int()
            ctypes.CDLL(name).ncclGetVersion(ctypes.byref(version))
        except (OSError, AttributeError) as error:
            found["refused"].append(said(error))
            continue
        found["nccl"] = {"code": version.value, "file": mapped("libnccl") or name}
        break
    return found


def mapped(name):
    """The file of a library that this process has loaded."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        return next((line.rstrip("\n").split(maxsplit=5)[-1] for line in maps if f"/{name}" in line), None)


def said(error):
    lines = str(error).splitlines() or [type(error).__name__]
    return lines[0]


print(json.dumps({"python": python, "torch": torch, "libraries": libraries}[sys.argv[1]](*sys.argv[2:])))
