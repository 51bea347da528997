"""Determines devices and numbers of replicas that the settings leave open. Pure: the machines' GPUs are a parameter.

If there are GPUs, each rank gets its own; only a fractional `gpus_per_rank` puts several ranks on one.
"""

import msgspec

from ..replica.config import for_device
from .config import Settings, replaced
from .control.autoscale import terms_of
from .control.engines.command import for_engine
from .errors import SettingsError

#: Default number of replicas without GPUs.
CPU_REPLICAS = 2


def resolve_devices(settings: Settings, gpus: tuple[float, ...]) -> Settings:
    """Return the settings with `gpus_per_rank`, `device`, `replicas` and limits filled in; those already set stay.

    `gpus` is the number of GPUs of each machine. Raises SettingsError for contradictory settings.
    """
    models = [for_engine(_on_device(each, any(gpus))) for each in settings.each_model]
    fixed = sum(each.ranks * each.cluster.gpus_per_rank for each in models)
    open_models = sum(not each.cluster.replicas and each.cluster.gpus_per_rank > 0 for each in models)
    share = max(0.0, 1 - fixed / (sum(gpus) or 1.0)) / max(1, open_models)
    settled = tuple(_with_replicas(each, gpus, share) for each in models)
    return msgspec.structs.replace(settings, models=settled) if settings.models else settled[0]


def _on_device(settings: Settings, has_gpus: bool) -> Settings:
    cluster, device = settings.cluster, settings.replica.device
    if device == "cpu" and cluster.gpus_per_rank:
        raise SettingsError(f"gpus_per_rank {cluster.gpus_per_rank:g} reserves GPUs for device: cpu; unset one of them")
    wants = device == "cuda" or (device == "auto" and has_gpus)
    per_rank = cluster.gpus_per_rank or float(wants)
    # A rank with a reserved GPU must use it: falling back to the CPU would waste the GPU and be slow.
    settings = replaced(settings, gpus_per_rank=per_rank, device="cuda" if per_rank else device)
    return msgspec.structs.replace(settings, replica=for_device(settings.replica, cuda=per_rank > 0))


def _with_replicas(settings: Settings, gpus: tuple[float, ...], share: float) -> Settings:
    """Set `replicas`, if open, to as many as fit on this share of the GPUs; at least one, and within `autoscale`."""
    cluster = settings.cluster
    if cluster.replicas:
        return settings
    per_replica = cluster.gpus_per_rank * settings.replica.tensor_parallel_size
    fit = sum(int(each / per_replica + 1e-9) for each in gpus) if per_replica else 0
    count = max(1, int(fit * share + 1e-9)) if per_replica else CPU_REPLICAS
    try:
        terms = terms_of(cluster)
    except ValueError:
        terms = None  # `preflight.check_bounds` reports it
    if terms is not None:
        count = min(max(count, terms.min_replicas, 1), max(terms.max_replicas, 1))
    return replaced(settings, replicas=count)
