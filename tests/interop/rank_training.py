# SPDX-License-Identifier: Apache-2.0
"""What each rank of `msrun` does: train two epochs with our callback, resume in a new one, and train the third.

`msrun ... rank_training.py DIRECTORY`; every rank leaves its parameters in a file.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from ckptmgr import Ranks


def main(directory: Path) -> None:
    """Be one rank."""
    import mindspore
    import numpy as np
    from mindspore.communication import init

    mindspore.set_device("CPU")
    init()

    from ckptmgr import CheckpointConfig, ModelCheckpoint
    from ckptmgr.files.load.network import load_into
    from ckptmgr.integrations.mindspore_ranks import mindspore_coordinator
    from tests.interop import training

    ranks = mindspore_coordinator(directory / "meeting")

    def callback() -> Any:
        config = CheckpointConfig(
            save_checkpoint_steps=training.STEPS_PER_EPOCH,
            async_save=True,
            remove_redundancy=True,
            append_info=["epoch_num", "step_num"],
        )
        return ModelCheckpoint(
            "net", str(directory / "run"), config, ranks=Ranks(ranks, timeout_s=60)
        )

    training.train([callback()], epochs=2)
    again = callback()
    found = again.resume()
    model = training.new_model(training.new_network(seed=9))
    load_into(model.train_network, found.values)
    model.train(3, training.dataset(), callbacks=[again], initial_epoch=found.checkpoint.epoch)
    ended: dict[str, Any] = training.numbers_of(model.train_network)
    np.savez(directory / f"rank-{ranks.rank}.npz", **ended)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
