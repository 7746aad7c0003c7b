"""The public programs that `scripts/strangers` runs: where they are, how they are run, and what they print."""

from dataclasses import dataclass, field

import strangers_data as data

EXAMPLES = "pytorch/examples", "77f55b912142e11fcfdf5b530231fb9c52f181e8"
# A line that a program has for GPUs only, changed so that it runs on CPUs: the same for gloo and for flow.
NO_GPU_CHECK = "return has_gpu and gpu_count >= min_gpus", "return True"
FSDP2_EDITS = [
    ("example.py", *NO_GPU_CHECK),
    ("example.py", "backend=backend, device_id=device", "backend=backend"),
    # The layers' memory would stay as it was allocated, and losses would be NaN.
    (
        "model.py",
        "        self.output.reset_parameters()\n",
        "        self.output.reset_parameters()\n        for layer in self.layers:\n            layer.reset_parameters()\n",
    ),
]


@dataclass
class Program:
    name: str
    # Repositories on GitHub, with the commit, and what of it is needed.
    sources: list
    # Where it runs, in the repository.
    folder: str
    command: str
    # In a line, what it has trained: the group is a number, or text.
    shows: str = ""
    # Files that must be the same after all runs.
    saves: str = ""
    # Makes its data in `folder`.
    make: object = None
    # (file, in `folder`; text; replacement)
    edits: list = field(default_factory=list)
    modules: list = field(default_factory=list)
    environment: dict = field(default_factory=dict)
    # How often it runs in a folder: the second time it goes on where it ended.
    times: int = 1


PROGRAMS = [
    Program(
        name="nanoGPT train.py",
        sources=[("karpathy/nanoGPT", "3adf61e154c3fe3fca428ad6bc3818b27a3b8291", ["train.py", "model.py", "configurator.py"])],
        folder=".",
        # README's for a CPU, with fewer steps.
        command="train.py --backend=gloo --dataset=made --device=cpu --compile=False --eval_iters=2 --log_interval=1 --block_size=64 "
        "--batch_size=12 --n_layer=4 --n_head=4 --n_embd=128 --gradient_accumulation_steps=2 --max_iters=60 --lr_decay_iters=60 --dropout=0.0",
        make=data.tokens,
        edits=[
            ("train.py", "    device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n", ""),
            ("train.py", "DDP(model, device_ids=[ddp_local_rank])", "DDP(model)"),
        ],
        shows=r"iter \d+: loss ([\d.]+)",
    ),
    Program(
        name="minGPT-ddp main.py",
        sources=[(*EXAMPLES, ["distributed/minGPT-ddp/mingpt"])],
        folder="distributed/minGPT-ddp/mingpt",
        command="main.py data_config.path=data/input.txt data_config.truncate=0.004 data_config.block_size=32 gpt_config.n_layer=4 "
        "gpt_config.n_head=4 gpt_config.n_embd=128 trainer_config.max_epochs=1 trainer_config.batch_size=8 "
        "trainer_config.data_loader_workers=0 trainer_config.save_every=1 trainer_config.use_amp=False",
        edits=[
            ("main.py", *NO_GPU_CHECK),
            (
                "main.py",
                "    acc = torch.accelerator.current_accelerator()\n"
                '    rank = int(os.environ["LOCAL_RANK"])\n'
                '    device: torch.device = torch.device(f"{acc}:{rank}")\n'
                "    backend = torch.distributed.get_default_backend_for_device(device)\n"
                "    init_process_group(backend=backend)\n"
                "    torch.accelerator.set_device_index(rank)\n",
                # It sets no seed.
                '    init_process_group(backend="gloo")\n    torch.manual_seed(1)\n',
            ),
            ("trainer.py", "self.acc = torch.accelerator.current_accelerator()", 'self.acc = "cpu"'),
            ("trainer.py", ".to(self.local_rank)", ".to(self.acc)"),
            ("trainer.py", "DDP(self.model, device_ids=[self.local_rank])", "DDP(self.model)"),
        ],
        modules=["hydra", "boto3", "fsspec"],
        shows=r"((?:Train|Eval) Loss [\d.]+)",
        saves="gpt_snapshot.pt",
    ),
    Program(
        name="imagenet main.py",
        sources=[(*EXAMPLES, ["imagenet/main.py"])],
        folder="imagenet",
        command="main.py made -a resnet18 -b 8 -j 0 -p 1 --epochs 1 --lr 0.01 --seed 1 --no-accel --dist-backend gloo --dist-url env://",
        make=data.image_folders,
        # It trains with DistributedDataParallel on GPUs only.
        edits=[
            (
                "main.py",
                "        print('using CPU, this will be slow')\n",
                "        print('using CPU, this will be slow')\n        model = torch.nn.parallel.DistributedDataParallel(model)\n",
            ),
        ],
        modules=["torchvision"],
        shows=r"Epoch: .*\sLoss (\S+)",
    ),
    Program(
        name="Kubeflow's mnist.py",
        sources=[("kubeflow/training-operator", "6f74c7f6b2ed6c27aabd82d0a316b23f0646059c", ["examples/pytorch/mnist/mnist.py"])],
        folder="examples/pytorch/mnist",
        command="mnist.py --backend gloo --no-cuda --log-interval 1",
        make=data.fashion_mnist,
        modules=["torchvision", "tensorboardX"],
        shows=r"loss=([\d.]+)|accuracy=([\d.]+)",
    ),
    Program(
        name="TRL's sft.py (Hugging Face Trainer)",
        sources=[("huggingface/trl", "35def3ee000a87f6839e66f4b7749b06274ed1b3", ["trl/scripts/sft.py"])],
        folder="trl/scripts",
        command="sft.py --model_name_or_path model --dataset_name text --output_dir out --max_steps 30 --per_device_train_batch_size 2 "
        "--max_length 64 --logging_steps 1 --save_strategy no --report_to none --use_cpu --bf16 False --gradient_checkpointing False",
        make=data.language_model,
        modules=["trl", "datasets"],
        shows=r"'loss': '?([\d.]+)",
        saves="out/model.safetensors",
    ),
    Program(
        name="accelerate's nlp_example.py",
        sources=[
            ("huggingface/accelerate", "16cb6eb80dd9aa8b4df1a63ef57863e455d53b83", ["examples/nlp_example.py"]),
            ("huggingface/evaluate", "a7dd338386a4fae9a1767e05eb9ef9479513d9e8", ["metrics/glue/glue.py"]),
        ],
        folder="examples",
        command="nlp_example.py --cpu",
        make=data.sentence_pairs,
        modules=["accelerate", "datasets", "evaluate", "sklearn"],
        shows=r"(epoch \d+: .*)",
    ),
    Program(
        name="Lightning's backbone_image_classifier.py",
        sources=[
            (
                "Lightning-AI/pytorch-lightning",
                "854037098554a5fbf6ab7c66ae9617987e82911f",
                ["examples/pytorch/basics/backbone_image_classifier.py"],
            )
        ],
        folder="examples/pytorch/basics",
        command="backbone_image_classifier.py --trainer.accelerator cpu --trainer.devices 2 --trainer.strategy ddp --trainer.max_epochs 1 "
        "--trainer.limit_train_batches 300 --trainer.limit_val_batches 10 --trainer.limit_test_batches 10 "
        "--trainer.limit_predict_batches 2 --trainer.enable_progress_bar false",
        make=data.lightning_mnist,
        modules=["lightning", "jsonargparse", "torchvision", "tensorboardX"],
        # Lightning's own data set instead of torchvision's: this one has no checksums.
        environment={"PL_USE_MOCKED_MNIST": "1"},
        shows=r"(test_loss\W+[\d.]+)",
        saves="lightning_logs/version_0/checkpoints/*.ckpt",
    ),
    Program(
        name="FSDP2 example.py",
        sources=[(*EXAMPLES, ["distributed/FSDP2"])],
        folder="distributed/FSDP2",
        command="example.py",
        edits=FSDP2_EDITS,
        times=2,
        saves="checkpoints/*/*/*.pt",
    ),
    Program(
        name="FSDP2 example.py --dcp-api",
        sources=[(*EXAMPLES, ["distributed/FSDP2"])],
        folder="distributed/FSDP2",
        command="example.py --dcp-api --explicit-prefetching",
        edits=FSDP2_EDITS,
        times=2,
        saves="checkpoints/*/*/*.pt",
    ),
    Program(
        name="tensor_parallel_example.py",
        sources=[(*EXAMPLES, ["distributed/tensor_parallelism"])],
        folder="distributed/tensor_parallelism",
        command="tensor_parallel_example.py",
        edits=[
            ("log_utils.py", *NO_GPU_CHECK),
            ("tensor_parallel_example.py", "torch.accelerator.current_accelerator().type", '"cpu"'),
        ],
    ),
    Program(
        name="sequence_parallel_example.py",
        sources=[(*EXAMPLES, ["distributed/tensor_parallelism"])],
        folder="distributed/tensor_parallelism",
        command="sequence_parallel_example.py",
        edits=[
            ("log_utils.py", *NO_GPU_CHECK),
            ("sequence_parallel_example.py", "torch.accelerator.current_accelerator().type", '"cpu"'),
        ],
    ),
]

# Why these have no row.
NOT_RUN = {
    "pytorch/examples' mnist": "it does not use torch.distributed",
    "fsdp_tp_example.py of pytorch/examples": "PyTorch 2.11 has no rule to shard scaled_dot_product_attention on CPUs",
    "the recipe of torch.distributed.checkpoint": "FullyShardedDataParallel, which it uses, needs an accelerator",
    "torchft's train_ddp.py": "torchft makes gloo's process group itself, so that FLOW_TORCH=1 does not change it",
    "torchtitan": "it takes CUDA where there is no accelerator, and has no CPU",
}
