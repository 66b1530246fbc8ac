"""Training by accelerate and the Hugging Face Trainer, in one process of several."""

import numpy as np
import torch

from ragged_format.testing import rollouts
from ragged_format.torch import RaggedDataset, RaggedLoader

VOCABULARY = 50


def samples(number=16):
    """Samples whose sets differ in width."""
    return rollouts(
        np.random.default_rng(0), num_samples=number, prompt_length=5, response_length=6,
        vocab_size=VOCABULARY, max_candidates=9,
    )  # fmt: skip


class Model(torch.nn.Module):
    """Takes token ids only, like a causal language model without labels."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(VOCABULARY, 4)

    def forward(self, input_ids):
        return self.embedding(input_ids)


def accelerated(rank, world_size):
    """The sample ids and set widths that each batch of an accelerate loop has on this rank."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    from ragged_format.errors import SchemaMismatchError
    from ragged_format.torch.glue.hf import RaggedCollator, check_accelerator

    try:
        check_accelerator(Accelerator())
    except SchemaMismatchError as err:
        refused = str(err)
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    check_accelerator(accelerator)
    loader = torch.utils.data.DataLoader(
        RaggedDataset(samples()), batch_size=2, collate_fn=RaggedCollator()
    )
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    seen = []
    for batch in loader:
        loss = model(batch["input_ids"].long()).square().sum() / batch.num_rows
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        seen.append((batch.strings("sample_id"), batch.width("candidate")))
    return refused, seen, accelerator.unwrap_model(model).embedding.weight.detach().numpy()


def trained(rank, world_size, path):
    """The sample ids of each step of a Trainer on a RaggedLoader, and the weight at the end."""
    from transformers import Trainer, TrainingArguments

    from ragged_format.torch.glue.hf import RaggedTrainerMixin, training_arguments

    seen = []

    class Ours(RaggedTrainerMixin, Trainer):
        def compute_loss(self, model, inputs, **_):
            seen.append(inputs.strings("sample_id"))
            return model(inputs["input_ids"].long()).square().mean()

    arguments = TrainingArguments(
        output_dir=path, max_steps=6, report_to=[], use_cpu=True, disable_tqdm=True,
        save_strategy="no", **training_arguments(),
    )  # fmt: skip
    with RaggedLoader(
        samples(), batch_size=2, shuffle=True, rank=rank, world_size=world_size, tail="pad"
    ) as loader:
        trainer = Ours(model=Model(), args=arguments, train_dataset=loader)
        trainer.train()
    weight = trainer.accelerator.unwrap_model(trainer.model).embedding.weight
    return seen, weight.detach().numpy()


def both(rank, world_size, path):
    """One start of processes for both."""
    return accelerated(rank, world_size), trained(rank, world_size, path)
