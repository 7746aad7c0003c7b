"""What PyTorch itself builds on process groups: device meshes, DTensor, FSDP2, distributed checkpoints."""

import os
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from result import end, tell

mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
rank = dist.get_rank()
assert rank == int(os.environ["RANK"]) and dist.get_node_local_rank() == int(os.environ["LOCAL_RANK"])

table = distribute_tensor(torch.arange(16.0).view(4, 4), mesh, [Shard(0)])
product = (table @ table).redistribute(placements=[Replicate()]).to_local()

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.full((2, 4), rank + 1.0)).square().mean().backward()
optimizer.step()

folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)
saved = {"model": model.state_dict()}
checkpoint.save(saved, checkpoint_id=folder[0])
norm = sum(parameter.full_tensor().norm().item() for parameter in model.parameters())
for parameter in model.parameters():
    torch.nn.init.zeros_(parameter)
checkpoint.load(saved, checkpoint_id=folder[0])
again = sum(parameter.full_tensor().norm().item() for parameter in model.parameters())
dist.barrier()
if rank == 0:
    for name in os.listdir(folder[0]):
        os.remove(os.path.join(folder[0], name))
    os.rmdir(folder[0])

tell(f"rank {rank}: {product.sum().item():.1f} {list(table.to_local().shape)} {norm:.4f} {norm == again}")
dist.destroy_process_group()
end()
