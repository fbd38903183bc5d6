"""Claims about routing.py: which server is asked, how much, and what becomes of a dead one's rollouts.

Run: pytest tests/test_routing.py
"""

import asyncio
import threading
import time
from collections import Counter

import pytest
from fake_server import FakeServer
from rollout_run import Run, options_for

from rollout import RolloutError
from routing import next_cap

# ---- server load


@pytest.mark.parametrize(
    "cap, running, finished, kv_usage, waiting, wanted",
    [
        (8, 8, 8, 0.5, 0, 10),
        (8, 8, 7, 0.5, 0, 8),  # not once per cap-many rollouts yet
        (8, 8, 8, 0.5, 1, 8),  # requests wait
        (8, 8, 8, 0.7, 0, 8),
        (10, 10, 0, 0.9, 0, 7),
        (10, 12, 0, 0.9, 0, 10),  # the last cut has not taken effect yet
        (1, 1, 9, 0.9, 0, 1),
    ],
)
def test_server_cap_follows_its_load(cap, running, finished, kv_usage, waiting, wanted):
    assert next_cap(cap, running, finished, kv_usage, waiting) == wanted


def test_no_more_rollouts_than_servers_and_resources_allow(model):
    for changes, capacity, most in [({"max_concurrent_rollouts": 6}, 64000, 6), ({}, 7000, 7)]:
        with FakeServer() as fake:
            fake.load["capacity"], fake.delay_s, seen = capacity, 0.05, []
            with Run(options_for(model, fake, task_kwargs={"size": 8}, **changes)) as run:
                for count in range(1, 9):
                    run.until(lambda: seen.append(len(run.loop._running)) or len(run.groups()) >= count)  # noqa: B023
            assert max(seen) == most


def test_rollouts_keep_their_numbers_where_some_end_before_others_begin(model):
    with FakeServer() as fake, Run(options_for(model, fake, max_concurrent_rollouts=2)) as run:
        samples = [s for g in run.groups(4) for s in g.samples]
    assert sorted(s.rollout_id for s in samples) == list(range(16))
    assert all(s.rollout_id // 4 == s.group_id for s in samples)


def test_server_without_metrics_gets_the_resource_limit(model):
    with FakeServer() as fake:
        fake.replies["/metrics"] = (404, {"detail": "Not Found"})
        with Run(options_for(model, fake, max_concurrent_rollouts=5)) as run:
            run.groups(4)
            assert run.loop.routing.cap() == 5


def test_load_of_several_servers_is_told_one_by_one_and_together(model):
    with FakeServer() as one, FakeServer() as two:
        one.load |= {"usage": 0.2, "running": 3}
        two.load |= {"usage": 0.7, "running": 4}
        with Run(options_for(model, one, two)) as run:
            run.groups(4)
            metrics = run.metrics()
    assert metrics["rollout/vllm_kv_cache_usage_frac"] == [0.7]
    assert metrics["rollout/vllm_running_requests"] == [7]
    assert metrics["server/1/rollout/vllm_running_requests"] == [4]


def test_whole_groups_go_to_the_least_loaded_server(model):
    with FakeServer() as one, FakeServer() as two:
        one.delay_s = two.delay_s = 0.05
        with Run(options_for(model, one, two, task_kwargs={"size": 12})) as run:
            run.groups(12)
        for fake in (one, two):
            assert len(fake.requests) >= 8
            assert set(Counter(tuple(body["prompt"]) for body in fake.requests).values()) == {4}


def test_rollouts_of_a_dead_server_go_on_at_the_others(model):
    with FakeServer() as one, FakeServer() as two:
        two.gate = threading.Event()
        with Run(options_for(model, one, two, task_kwargs={"size": 12})) as run:
            run.until(lambda: len(two.requests) >= 4)
            two.die()
            groups = run.groups(12)
            assert run.loop.routing.down() == [two.url]
            assert f"down: {two.url}" in run.loop.status(time.monotonic())
            assert [load.running for load in run.loop.loads] == [0, 0]
    assert sorted(g.group_id for g in groups) == list(range(12)) and all(len(g.samples) == 4 for g in groups)
    lost = {body["seed"] for body in two.requests}
    assert lost and lost <= {body["seed"] for body in one.requests}, "the very requests are sent again"


def test_server_that_returns_is_used_once_it_has_the_current_weights(model):
    with FakeServer() as one, FakeServer() as two:
        with Run(options_for(model, one, two, task_kwargs={"size": 1}), version=3) as run:
            run.groups(1)
            look = lambda: asyncio.run_coroutine_threadsafe(  # noqa: E731
                run.loop.routing.look(), run.event_loop
            ).result(5)
            for version, wanted in (("default", True), ("2", True), ("3", False)):
                two.replies["/weight_info"] = (200, {"weight_version": version})
                look()
                assert run.loop.routing.down() == [two.url] * wanted
            one.replies["/weight_info"] = two.replies["/weight_info"] = (200, {"weight_version": "default"})
            with pytest.raises(RolloutError, match="it was restarted"):
                look()


def tell(run: Run, *servers: FakeServer) -> None:
    """What the trainer's publish does: name the servers that hold the current version."""
    run.link.holds[:] = [url in [s.url for s in servers] for url in run.loop.options.vllm_server_base_url]
    run.link.told.value += 1


def test_server_without_the_current_weights_is_asked_nothing(model, capfd):
    with FakeServer() as one, FakeServer() as two:
        options = options_for(model, one, two, task_kwargs={"size": 12})
        with Run(options, allowance=0) as run:
            tell(run, one)
            run.until(lambda: f"down: {two.url}" in run.link.said())
            run.link.allowance.value = 10**9
            run.groups(12)
            assert not two.requests and len(one.requests) == 48
    assert f"{two.url} lacks the current weights and is asked for nothing" in capfd.readouterr().out


def test_what_a_server_without_the_current_weights_still_holds_goes_on_elsewhere(model):
    """It is alive but paused for good, so its requests would stay open: they are ended there."""
    with FakeServer() as one, FakeServer() as two:
        two.gate = threading.Event()
        with Run(options_for(model, one, two, task_kwargs={"size": 12})) as run:
            run.until(lambda: len(two.requests) >= 4)
            two.script = ["503"] * 100  # how an aborted request ends
            tell(run, one)
            run.until(lambda: ("/abort_requests", {}) in two.calls)
            two.gate.set()
            assert len(run.groups(12)) == 12


def test_rollouts_wait_while_no_server_has_the_current_weights(model):
    with FakeServer() as one, Run(options_for(model, one), allowance=0) as run:
        tell(run)
        run.link.allowance.value = 10**9
        run.until(lambda: "a free slot of a server" in run.loop._waiting_for)
        time.sleep(0.2)
        assert not one.requests
        tell(run, one)
        run.groups(4)


def test_dead_server_is_asked_again_once_the_trainer_has_given_it_the_weights(model, capfd):
    with FakeServer() as one, FakeServer() as two:
        two.script, two.replies["/health"] = ["500"] * 4, (503, "")
        one.delay_s = two.delay_s = 0.02
        with Run(options_for(model, one, two, task_kwargs={"size": 400})) as run:
            run.until(lambda: run.loop.routing.down() == [two.url])
            run.groups(15)
            asked = len(two.requests)  # those that were under way have arrived
            run.groups(25)
            assert len(two.requests) == asked
            del two.replies["/health"]
            tell(run, one, two)
            run.until(lambda: len(two.requests) > asked)
            assert all(len(g.samples) == 4 for g in run.groups(30))
    assert f"{two.url} is up again, with the current weights" in capfd.readouterr().out
