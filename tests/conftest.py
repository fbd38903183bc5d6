"""What several test files use: a tokenizer of words, and the shipped one."""

import json
import signal

import pytest
import torch.distributed as dist
from fake_server import EOS, VOCABULARY
from rollout_run import TINY


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    """A directory with a tokenizer of whole words, a chat template and a config, but no weights."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    directory = tmp_path_factory.mktemp("model")
    words = ["<pad>", "<bos>", "<eos>", "user", "assistant", "system", "tool"]
    vocabulary = {word: i for i, word in enumerate(words + [str(i) for i in range(40)])}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} <eos> {% endfor %}"
        "{% if add_generation_prompt %}assistant {% endif %}"
    )
    tokenizer.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": VOCABULARY}))
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, 5]}))
    return str(directory)


@pytest.fixture(scope="session")
def tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(TINY)


@pytest.fixture
def alone():
    """train.train() in this process: the group it may leave and its signal handlers are taken back."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)
    if dist.is_initialized():
        dist.destroy_process_group()
