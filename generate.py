"""Generation and scoring alone (--rollout_only): what the weights on the servers make of a task.

Which half of a run is wrong? This is one of them; --replay, training from what --record kept, is the other.
"""

from __future__ import annotations

import math
import os
import queue
import sys
from contextlib import ExitStack
from dataclasses import replace

import torch

from client import Notice
from conversation import load_tokenizer
from metrics import Window
from options import OptionError, Options, check
from process import RolloutProcess
from rollout import GroupMessage, MetricsMessage
from start import Ranks, check_inputs, reach_servers, start_embedded
from teachers import check_teachers


def generate(options: Options) -> dict[str, float]:
    """Play every prompt once per epoch, on the servers as they are.

    Prints and returns what was measured over all of it; --record keeps the groups. One process.
    """
    check(options)
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        raise OptionError("--rollout_only is one process: start it without torchrun")
    check_inputs(options, None)
    with ExitStack() as ends:
        embedded = None
        if options.embedded:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            embedded = start_embedded(options, Ranks(0, 1, device, None, None), ends)
        urls = [server.url for server in reach_servers(options, embedded)]
        if options.has_teachers:
            check_teachers(options, load_tokenizer(options), None)
        rollouts = RolloutProcess(replace(options, vllm_server_base_url=urls))
        ends.callback(rollouts.stop)
        rollouts.start(0, set(), 0)
        rollouts.publish(0, sys.maxsize)
        window, groups, size, notice = Window(), 0, None, Notice()
        while size is None or groups < math.ceil(options.num_train_epochs * size):
            try:
                message = rollouts.queue.get(timeout=0.1)
            except queue.Empty:
                rollouts.check()
                notice.say(f"rollouts: {rollouts.status()}")
                continue
            measure(window, message)
            if isinstance(message, GroupMessage):
                groups, size, notice = groups + 1, message.dataset_size, Notice()
            notice.say(f"rollouts: {rollouts.status()}")
        rollouts.stop()
        while not rollouts.queue.empty():
            measure(window, rollouts.queue.get())
    values = {"groups": groups, **window.values()}
    for name, value in sorted(values.items()):
        print(f"{name:48} {value:.6g}", flush=True)
    return values


def measure(window: Window, message) -> None:
    """What a message of the rollout process says, where nothing is trained."""
    if isinstance(message, MetricsMessage):
        window.update(message.values)
    elif isinstance(message, GroupMessage):
        for sample in message.samples:
            window.update({name: [value] for name, value in sample.metrics.items()})
