"""A site whose loop reads leased data by a loader with workers of its own, which are forked after it has joined.

Argument: the syncer's address.  Prints how many samples it read, how many of them twice, and its steps.
"""

from __future__ import annotations

import sys

import torch
from torch.utils.data import DataLoader, Dataset

import diloco

SAMPLES = 4000


class Essays(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index

    def __len__(self) -> int:
        return SAMPLES


def main() -> None:
    data = {"data": "essays", "samples": SAMPLES, "samples_per_step": 2}
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    read: list[int] = []
    with diloco.join(model, optimizer, syncer=sys.argv[1], site="fra", tokens_per_step=10, **data) as outer:  # type: ignore[arg-type]
        batches = outer.batches(2)
        for pair in DataLoader(Essays(), batch_sampler=batches, num_workers=2, multiprocessing_context="fork"):
            read += pair.tolist()
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            if outer.steps == 60:
                break
    print(len(read), len(read) - len(set(read)), outer.steps)


if __name__ == "__main__":
    main()
