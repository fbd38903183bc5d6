"""The worked examples in tasks/, each played through the rollout loop on a scripted server.

Run: pytest tests/test_examples.py
"""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from cases import reduced
from fake_server import FakeServer
from rollout_run import Run, calling, replies, tool_options

from task import load_task
from tasks import arithmetic, guess, maths


def example_options(server: FakeServer, task: str, **changes):
    options = tool_options(server, "lengths", **changes)
    options.task = task
    return options


def test_curriculum_samples_no_solved_prompt_again(tokenizer):
    def answer(body):
        question = tokenizer.decode(body["prompt"]).split("sort: ")[1].split("<|end|>")[0]
        right = len(question) == 3 or len(question) == 4 and body["seed"] % 2
        return replies(tokenizer, "".join(sorted(question)) if right else "no")(body)

    with FakeServer() as fake:
        fake.answer = answer
        options = example_options(
            fake,
            "tasks/curriculum.py",
            rollout_loop="tasks/curriculum.py:Curriculum",
            task_kwargs={"size": 1, "solved": 0.9},
            max_concurrent_rollouts=4,  # one group at a time: a prompt is scored before it comes again
            num_train_epochs=2.0,
        )
        with Run(options) as run:
            groups = run.groups(12)
            right = run.loop.right
            metrics = run.metrics()
    assert sorted(right.values())[-1] == 1.0
    (easy,) = [row for row, rate in right.items() if rate == 1.0]
    by_id = {group.group_id: group.dropped for group in groups}
    assert by_id[easy] == "equal rewards" and by_id[easy + 6] == "refused by filter_prompt"
    assert len(fake.requests) == 4 * 11
    assert metrics["curriculum/solved_frac"] == (1, 11)


class StandIn:
    """A judge that gives a mark for the number of letters, and once no mark at all."""

    def __enter__(self):
        judge = self
        self.asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                judge.asked.append(body)
                answer = body["messages"][0]["content"].split("Answer: ")[1]
                said = "I cannot say." if answer == "?" else f" {min(len(answer), 10)} of 10"
                data = json.dumps({"choices": [{"message": {"content": said}}]}).encode()
                self.send_response(200 if self.path == "/v1/chat/completions" else 404)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_address[1]}"
        threading.Thread(target=self._http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._http.shutdown()
        self._http.server_close()


def test_judge_marks_completions_over_http(tokenizer):
    with FakeServer() as fake, StandIn() as judge:
        texts = iter(["?", "four", "tenletters", ""])

        def answer(body):
            return replies(tokenizer, next(texts, "?"))(body)

        fake.answer = answer
        options = example_options(
            fake, "tasks/judge.py:task", task_kwargs={"url": judge.url, "model": "small"}
        )
        with Run(options) as run:
            run.groups(1)
            assert sorted(run.metrics()["reward"][:3]) == [0.0, 0.4, 1.0], "no mark is no reward"
    assert judge.asked[0]["model"] == "small" and judge.asked[0]["temperature"] == 0
    assert "Question: Explain " in judge.asked[0]["messages"][0]["content"]


def test_number_is_guessed_by_halving(tokenizer):
    def halve(body):
        """Plays by what the tool said so far."""
        low, high = 1, 20
        for part in tokenizer.decode(body["prompt"]).split("<|user|>")[1].split('"number": ')[1:]:
            number, said = int(part.split("}")[0]), part.split("<|tool|>")[1].split("<|end|>")[0]
            if said == "right":
                return replies(tokenizer, f"It was {number}.")(body)
            low, high = (number + 1, high) if said == "higher" else (low, number - 1)
        return replies(tokenizer, calling("guess", {"number": (low + high) // 2}))(body)

    with FakeServer() as fake:
        fake.answer = halve
        options = example_options(fake, "tasks/guess.py", task_kwargs={"size": 2, "seed": 1})
        fake.max_model_len = 1024  # the shipped model's context
        with Run(options) as run:
            groups = run.groups(2)
            metrics = run.metrics()
    assert [group.dropped for group in groups] == ["equal rewards"] * 2
    rows = guess.dataset(size=2, seed=1)
    misses = [steps_to(number) - 1 for number in rows["number"]]
    assert sorted(metrics["reward"]) == pytest.approx(sorted([1 - 0.1 * m for m in misses] * 4))
    assert "tools/guess/latency_s" in metrics and reduced(metrics["tools/failure_frequency"]) == 0


def steps_to(number: int) -> int:
    low, high = 1, 20
    for step in range(1, 9):
        tried = (low + high) // 2
        if tried == number:
            return step
        low, high = (tried + 1, high) if tried < number else (low, tried - 1)


def test_game_ends_with_its_guesses():
    game = guess.Guess()
    game.reset(number=7, highest=20, guesses=2)
    assert [game.guess(n) for n in (3, 9, 7)] == ["higher", "lower", "the game is over"]
    assert game.get_reward() == 0.0


def test_calculator_calculates_and_runs_nothing_else():
    assert arithmetic.calculate("(37 * 48) - -519") == 2295
    for text in ("2 ** 9", "__import__('os')", "1 +", "1.5", "9" * 300, "abs(1)"):
        with pytest.raises(ValueError):
            arithmetic.calculate(text)


def test_arithmetic_is_scored_by_the_last_number(tokenizer):
    row = arithmetic.dataset(size=1)[0]
    expression, right = row["prompt"][0]["content"], row["answer"]
    with FakeServer() as fake:
        fake.answer = replies(tokenizer, calling("calculate", {"expression": expression}), f"It is {right}.")
        with Run(example_options(fake, "tasks/arithmetic.py", task_kwargs={"size": 1})) as run:
            run.groups(1)
            assert run.metrics()["reward"] == [1.0] * 4
    said = [[{"role": "assistant", "content": text}] for text in ("5 or 6", "6 or 5", "none", None)]
    assert arithmetic.is_right(None, [*said, []], None, [5] * 5) == [0, 1, 0, 0, 0]


@pytest.mark.parametrize("name", ["sort.py", "curriculum.py", "judge.py:task", "guess.py", "arithmetic.py"])
def test_every_example_loads_by_its_path(name):
    task = load_task(f"tasks/{name}")
    assert len(task.dataset) > 0 and (task.rewards or task.environments)


def test_word_problems_come_from_a_file_and_are_scored_by_their_box(tmp_path):
    path = tmp_path / "problems.jsonl"
    solutions = ["2 + 3 = 5\n#### 1,005", "it is \\boxed{\\frac{1}{2}}", "7"]
    path.write_text(
        "".join(json.dumps({"question": f"q{i}", "answer": s}) + "\n" for i, s in enumerate(solutions))
    )
    rows = maths.dataset(str(path))
    assert list(rows["answer"]) == ["1,005", "\\frac{1}{2}", "7"] and len(rows.column_names) == 2
    assert rows[0]["prompt"][0]["content"].startswith("q0\n") and len(maths.dataset(str(path), size=2)) == 2
    with pytest.raises(ValueError, match="has no column problem; it has"):
        maths.dataset(str(path), question="problem")
    said = [
        "\\boxed{3} no, \\boxed{1005}",
        "\\boxed{0.5}",
        "7",
        "\\boxed{7",
        "\\boxed{$7.00}",
        "\\boxed{x^{2}}",
        None,
    ]
    completions = [[{"role": "assistant", "content": text}] for text in said] + [[]]
    right = ["1,005", "\\frac{1}{2}", "7", "7", "7", "x^{2}", "7", "7"]
    assert maths.is_right(None, completions, None, right) == [1, 1, 0, 0, 1, 1, 0, 0]
