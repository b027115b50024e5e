"""Fit a small network with Keras. Kill it and start it again: it goes on, bit for bit."""

import os
import sys

os.environ.setdefault("KERAS_BACKEND", "torch")  # or jax

import keras
import numpy as np
from keras import layers

from ckptmgr import CheckpointConfig
from ckptmgr.integrations.keras import KerasCheckpoints


def main(directory, steps):
    keras.utils.set_random_seed(0)
    x = np.random.normal(size=(160, 8)).astype("float32")
    y = x.sum(1, keepdims=True)
    model = keras.Sequential(
        [
            layers.Input((8,)),
            layers.Dense(32, activation="relu"),
            layers.BatchNormalization(),
            layers.Dropout(0.2),
            layers.Dense(1),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    with KerasCheckpoints(directory, CheckpointConfig(keep="last(2)")) as checkpoints:
        model.fit(
            x,
            y,
            batch_size=16,
            epochs=-(-steps // 10),
            initial_epoch=checkpoints.initial_epoch,
            callbacks=[checkpoints],
        )
    return model.get_state_tree(value_format="numpy_array")


if __name__ == "__main__":
    print(main(sys.argv[1] if len(sys.argv) > 1 else "runs/keras", 30)["metrics_variables"])
