"""Other ends for train(): samples from a list instead of a rollout process, and no servers at all."""

import queue

import numpy as np
import torch

from packing import Sample
from rollout import GroupMessage


class ListRollouts:
    """A producer that has everything ready: groups of samples, in order."""

    held = False

    def __init__(self, groups: list[list[Sample]]):
        self.queue = queue.Queue()
        for number, samples in enumerate(groups):
            counts = {"samples": len(samples), "tokens": sum(int(s.trained.sum()) for s in samples)}
            self.queue.put(GroupMessage(number, samples, None, len(groups), counts))
        self.published = []

    def start(self, position, finished, version):
        left = [message for message in self.queue.queue if message.group_id >= position]
        self.queue.queue.clear()
        self.queue.queue.extend(message for message in left if message.group_id not in finished)

    def stop(self):
        pass

    def check(self):
        pass

    def publish(self, version, allowance, again=(), servers=None):
        self.published.append((version, allowance))

    def status(self):
        return "a list"


class NoSync:
    """No servers: counts the versions that were sent."""

    def __init__(self):
        self.versions = []

    def init(self):
        pass

    def prepare(self, model):
        pass

    def pause(self):
        pass

    def send(self, model, version):
        self.versions.append(version)

    def resume(self):
        pass

    def close(self):
        pass


def random_groups(
    count: int, generations: int = 4, seed: int = 0, vocabulary: int = 250
) -> list[list[Sample]]:
    """Groups whose samples share a prompt and, now and then, the start of a completion."""
    rng = np.random.default_rng(seed)
    groups = []
    for number in range(count):
        prompt = rng.integers(0, vocabulary, rng.integers(3, 12))
        stem = rng.integers(0, vocabulary, 4)
        samples = []
        for rollout in range(generations):
            tail = rng.integers(0, vocabulary, rng.integers(1, 15))
            ids = np.concatenate([prompt, stem[: rng.integers(0, 5)], tail]).astype(np.int32)
            trained = np.zeros(len(ids), bool)
            trained[len(prompt) :] = True
            logp = rng.normal(-5, 0.3, len(ids)).astype(np.float32)
            samples.append(Sample(ids, trained, logp, float(rng.normal()), number, number, rollout, 0))
        groups.append(samples)
    return groups


def waits_of_a_step(trainer, step: int) -> list[str]:
    """The CUDA calls, by name, in which the host waits for the device from the start of an optimizer step to
    its norm. The list is filled when train() has made that step, under the profiler; `step` counts from 0."""
    accumulate, optimizer_step = trainer.accumulate, trainer.optimizer_step
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    profiler, mark, waits = torch.profiler.profile(activities=activities), [], []

    def begin(run):
        if run.step == step:
            profiler.start()
            mark.append(torch.profiler.record_function("optimizer step"))
            mark[0].__enter__()
        return accumulate(run)

    def end(*arguments):
        norm = optimizer_step(*arguments)
        if mark:
            mark.pop().__exit__(None, None, None)
            profiler.stop()
            events = [e for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CPU]
            (whole,) = (e.time_range for e in events if e.name == "optimizer step")
            for event in events:
                waiting = event.name.endswith("Synchronize") or event.name == "cudaMemcpy"
                if waiting and whole.start <= event.time_range.start <= whole.end:
                    waits.append(event.name)
        return norm

    trainer.accumulate, trainer.optimizer_step = begin, end
    return waits
