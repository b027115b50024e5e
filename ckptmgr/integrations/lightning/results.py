# SPDX-License-Identifier: Apache-2.0
"""The running results of a training epoch: `self.log(on_epoch=True)`, and metrics of torchmetrics.

Lightning saves neither, so that the mean of an epoch that was resumed would be that of its rest.
Only results of training are here: a step is saved after its validation, which leaves none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

_FIELDS = ("prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")
_REDUCTIONS: dict[str, Any] = {
    "mean": torch.mean,
    "sum": torch.sum,
    "max": torch.max,
    "min": torch.min,
    "builtins.sum": sum,
    "builtins.max": max,
    "builtins.min": min,
}


def running_results(trainer: Any) -> dict[str, Any]:
    """Return the results of an epoch so far, and the states of the metrics of the module."""
    logged = trainer.fit_loop.epoch_loop._results
    return {
        "logged": [_stored(one) for one in logged.values() if not one.has_reset],
        "metrics": {name: _metric_state(one) for name, one in _metrics(trainer.lightning_module)},
    }


def restore_results(trainer: Any, stored: Mapping[str, Any]) -> None:
    """Put `running_results` back; the metrics that the module has no more are left out."""
    module = trainer.lightning_module
    metrics = dict(_metrics(module))
    for name in metrics.keys() & stored["metrics"].keys():
        _set_metric_state(metrics[name], stored["metrics"][name], module.device)
    for one in stored["logged"]:
        if one["metric"] is None or one["metric"] in metrics:
            _log_again(trainer, one, metrics.get(one["metric"]))


def _stored(result: Any) -> dict[str, Any]:
    meta = result.meta
    return {
        "fx": meta.fx,
        "name": meta.name,
        "reduce_fx": next(name for name, one in _REDUCTIONS.items() if one is meta.reduce_fx),
        "sync_dist": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "metric": meta.metric_attribute,
        "cache": _copied(result._forward_cache),
        "value": _copied(result.value) if result.is_tensor else None,
        "size": _copied(getattr(result, "cumulated_batch_size", None)),
        **{name: getattr(meta, name) for name in _FIELDS},
    }


def _log_again(trainer: Any, stored: Mapping[str, Any], metric: Any) -> None:
    """Have Lightning make the entry, as `self.log` does, and give it its values."""
    results, device = trainer.fit_loop.epoch_loop._results, trainer.lightning_module.device
    results.log(
        stored["fx"],
        stored["name"],
        torch.zeros((), device=device) if metric is None else metric,
        reduce_fx=_REDUCTIONS[stored["reduce_fx"]],
        sync_dist=stored["sync_dist"],
        sync_dist_fn=trainer.strategy.reduce,
        batch_size=1,
        metric_attribute=stored["metric"],
        rank_zero_only=stored["rank_zero_only"],
        **{name: stored[name] for name in _FIELDS},
    )
    made = results[f"{stored['fx']}.{stored['name']}"]
    made._forward_cache = _moved(stored["cache"], device)
    if stored["value"] is not None:
        made.value = _moved(stored["value"], device)
    if stored["size"] is not None:
        made.cumulated_batch_size = _moved(stored["size"], device)


def _metrics(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the metrics of torchmetrics in a module, those of a group with equal states."""
    for name, one in module.named_modules():
        kinds = {cls.__name__ for cls in type(one).__mro__ if "torchmetrics" in cls.__module__}
        if "MetricCollection" in kinds:
            list(one.values(copy_state=False))  # one of a group is updated, the others refer to it
        elif "Metric" in kinds:
            yield name, one


def _metric_state(metric: Any) -> dict[str, Any]:
    return {
        "states": {name: _copied(value) for name, value in metric.metric_state.items()},
        "updates": metric._update_count,
        "cache": _copied(metric._forward_cache),
    }


def _set_metric_state(metric: Any, stored: Mapping[str, Any], device: Any) -> None:
    for name, value in stored["states"].items():
        setattr(metric, name, _moved(value, device))
    metric._update_count = stored["updates"]
    metric._forward_cache = _moved(stored["cache"], device)
    metric._computed = None


def _copied(value: Any) -> Any:
    """Return a value that later batches do not change; what is no tensor is not stored."""
    if isinstance(value, list):
        return [_copied(one) for one in value]
    return value.detach().clone() if isinstance(value, torch.Tensor) else None


def _moved(value: Any, device: Any) -> Any:
    if isinstance(value, list):
        return [_moved(one, device) for one in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value
