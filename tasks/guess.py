"""Guess a number: an environment with a state, a tool and a reward of its own.

    user        I think of a number from 1 to 20. You have 5 guesses.
    assistant   <tool_call>{"name": "guess", "arguments": {"number": 10}}</tool_call>
    tool        higher
    assistant   <tool_call>{"name": "guess", "arguments": {"number": 15}}</tool_call>
    tool        right
    assistant   It was 15.                                                reward 0.9: a tenth for each miss

The rollouts of a group share the row, so they look for the same number and their rewards can be compared. The
environment's only public method besides reset and get_reward is the tool; its docstring is what the model
reads.
"""

import random

import datasets


def dataset(size: int = 1024, seed: int = 0, highest: int = 20, guesses: int = 5) -> datasets.Dataset:
    """Rows that `reset` gets: no prompt, the environment writes it."""
    rng = random.Random(seed)
    numbers = [rng.randint(1, highest) for _ in range(size)]
    return datasets.Dataset.from_dict(
        {"number": numbers, "highest": [highest] * size, "guesses": [guesses] * size}
    )


class Guess:
    def reset(self, number: int, highest: int, guesses: int, **columns) -> str:
        self.number, self.left = number, guesses
        self.misses, self.found = 0, False
        return f"I think of a number from 1 to {highest}. You have {guesses} guesses."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: your guess
        """
        if self.found or self.left == 0:
            return "the game is over"
        self.left -= 1
        self.found = number == self.number
        if self.found:
            return "right"
        self.misses += 1
        return "higher" if number < self.number else "lower"

    def get_reward(self) -> float:
        return max(1 - 0.1 * self.misses, 0.1) if self.found else 0.0


environments = Guess
