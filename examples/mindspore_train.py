"""Train a small network with MindSpore. Kill it and start it again: it goes on, bit for bit."""

import sys

import mindspore
import numpy as np
from mindspore import nn
from mindspore.dataset import NumpySlicesDataset
from mindspore.train import Model

from ckptmgr.integrations.mindspore import CheckpointConfig, MindSporeCheckpoints


def main(directory, epochs):
    mindspore.set_seed(0)
    inputs = np.random.default_rng(0).normal(size=(160, 8)).astype(np.float32)
    targets = inputs.sum(1, keepdims=True)
    data = NumpySlicesDataset((inputs, targets), ["x", "y"], shuffle=True).batch(16)
    network = nn.SequentialCell(nn.Dense(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dense(32, 1))
    rates = nn.exponential_decay_lr(1e-2, 0.9, total_step=100, step_per_epoch=10, decay_epoch=1)
    model = Model(network, nn.MSELoss(), nn.AdamWeightDecay(network.trainable_params(), rates))
    checkpoints = MindSporeCheckpoints(directory, CheckpointConfig(keep="last(2)"))
    first = checkpoints.resume(model, data, epochs)
    model.train(epochs, data, callbacks=[checkpoints], initial_epoch=first)
    return {one.name: one.asnumpy() for one in model.train_network.get_parameters()}


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "runs/mindspore", 3)
