"""Load, compare, save and load again every model under a directory: pretrained_ranks.py DIRECTORY

Run under torchrun by
test_pretrained.py; rank 0 prints a JSON line: model -> bytes read by each rank, or its fault.
"""

import json
import sys
import traceback
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent.parent)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transformers.utils import logging  # noqa: E402

import pretrained  # noqa: E402
import start  # noqa: E402
from checkpoint import SaveError, Saver  # noqa: E402
from options import Options  # noqa: E402
from sync import full_tensor  # noqa: E402


class Counted:
    """A tensor of a file; counts the bytes that are read of it."""

    read = 0

    def __init__(self, source):
        self.source, self.get_shape = source, source.get_shape

    def __getitem__(self, place):
        value = self.source[place]
        Counted.read += value.nbytes
        return value


class CountedFile:
    def __init__(self, path, **kwargs):
        self.file = inner(path, **kwargs)
        self.keys = self.file.keys

    def get_slice(self, key):
        return Counted(self.file.get_slice(key))


inner, pretrained.safe_open = pretrained.safe_open, CountedFile


def same(model, other) -> None:
    """Every parameter and buffer is bit-equal."""
    found = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wanted = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    for name, tensor in found.items():
        assert torch.equal(full_tensor(tensor), wanted[name].detach()), name


def round_trip(path: Path, ranks) -> list[int]:
    saved_to = path.parent.parent / f"saved-{path.name}-{ranks.size}"
    options = Options(model=str(path), bf16=False, output_dir=str(saved_to), save_only_model=True)
    Counted.read = 0
    model, tokenizer = start.load_model(options, ranks)
    read = [None] * ranks.size
    dist.all_gather_object(read, Counted.read)
    whole = type(model).from_pretrained(path, dtype=torch.float32)
    same(model, whole)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    seen = {
        name for name in dict(whole.named_parameters()) if name.startswith(("model.visual", "model.vision"))
    }
    seen |= {name for name in dict(whole.named_parameters()) if "multi_modal" in name}
    assert trained == dict(whole.named_parameters()).keys() - seen
    with torch.no_grad():
        for number, tensor in enumerate(pretrained.saved_tensors(model).values()):
            tensor.add_(number + 1)
        for number, tensor in enumerate(pretrained.saved_tensors(whole).values()):
            tensor.add_(number + 1)
    saver = Saver(options, model, None, tokenizer, None)
    assert "disk full" in failed(saver, "write_file")
    assert "disk full" in failed(saver, "revert_weight_conversion")
    saver.save(1, {})
    saver.wait()
    again = type(model).from_pretrained(saver.saved, dtype=torch.float32)
    same(model, again)
    assert names(saver.saved) == names(path)
    return read


def failed(saver: Saver, step: str) -> str:
    """What every rank is told, within seconds, when a step of rank 0's writing fails."""

    def full(*_):
        raise OSError("disk full")

    inner = getattr(pretrained, step)
    setattr(pretrained, step, full)
    saver.save(1, {})
    try:
        saver.wait(20.0)
    except SaveError as error:
        return str(error)
    finally:
        setattr(pretrained, step, inner)
    return ""


def names(path: Path) -> set[str]:
    return {key for file in path.glob("*.safetensors") for key in inner(file, framework="pt").keys()}


def main(directory: str) -> None:
    logging.disable_progress_bar()
    ranks = start.join_ranks(Options(model="tiny"))
    found = {}
    for path in sorted(Path(directory).iterdir()):
        try:
            found[path.name] = round_trip(path, ranks)
        except Exception:
            found[path.name] = traceback.format_exc()
    if ranks.rank == 0:
        print("\n" + json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
