"""One optimizer step on a fixed list of samples; writes its gradients: gradients.py OUT --name value ...

Several steps, each from the start, stand one after another with `then` between them. Run alone or, one step,
under torchrun; test_train.py compares what different splits of the same samples give.
"""

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

import torch  # noqa: E402
from replay import ListRollouts, NoSync, random_groups  # noqa: E402
from torch.distributed.tensor import distribute_tensor  # noqa: E402

import start  # noqa: E402
import train as trainer  # noqa: E402
from lora import adapted_layers  # noqa: E402
from options import parse  # noqa: E402
from sync import full_tensor  # noqa: E402


def waken_adapters(model) -> None:
    """B = 0 would give A no gradient."""
    for layer in adapted_layers(model).values():
        up = layer.lora_B
        values = torch.linspace(-0.1, 0.1, up.numel()).view(up.shape)
        up.data.copy_(distribute_tensor(values, up.device_mesh, up.placements, src_data_rank=None))


inner, load = trainer.optimizer_step, start.load_model


def main(out: str, *arguments: str) -> None:
    def loaded(options, ranks):
        model, tokenizer = load(options, ranks)
        waken_adapters(model)
        return model, tokenizer

    def recorded(model, optimizer, scheduler, divisor, max_grad_norm):
        # every rank gathers; the clipping and the step itself come after
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        grads = {name: full_tensor(p.grad) / divisor for name, p in trained}
        if torch.distributed.get_rank() == 0:
            torch.save(grads, out)
        return inner(model, optimizer, scheduler, divisor, max_grad_norm)

    trainer.optimizer_step, start.load_model = recorded, loaded
    fixed = [
        "--model",
        "tiny",
        "--bf16",
        "false",
        "--num_train_epochs",
        "1",
        "--gradient_accumulation_steps",
        "999",
    ]
    options = parse(fixed + ["--output_dir", f"{out}.run", "--save_only_model", "true", *arguments])
    trainer.train(options, rollouts=ListRollouts(random_groups(8)), sync=NoSync())


if __name__ == "__main__":
    runs = [[]]
    for word in sys.argv[1:]:
        runs.append([]) if word == "then" else runs[-1].append(word)
    for words in runs:
        main(*words)
