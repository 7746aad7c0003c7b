"""What elastic_launch returns, for functions and commands."""

import os
import sys

from flow_launch import LaunchConfig, elastic_launch


class Word:
    """Of the main script, as the functions are."""

    def __init__(self, text):
        self.text = text


def greet(word, times):
    return Word(f"{word.text} {os.environ['RANK']}" * times)


def second_time():
    assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1", "too early"
    return int(os.environ["RANK"]), os.environ["ROLE_NAME"], os.environ["TORCHELASTIC_RUN_ID"]


def end_without_result():
    sys.exit(0)


if __name__ == "__main__":
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="a-job", max_restarts=0)
    print({rank: word.text for rank, word in elastic_launch(config, greet)(Word("hello"), 1).items()})
    print(elastic_launch(config, sys.executable)("-c", "import sys; print(sys.argv[1:])", "${local_rank}", 2))
    print(elastic_launch(config, ["sh", "-c"])("echo $RANK"))
    print(elastic_launch(config, end_without_result)())
    config.max_restarts = 1
    print(elastic_launch(config, second_time)())
    print("PyTorch was imported:", "torch" in sys.modules)
