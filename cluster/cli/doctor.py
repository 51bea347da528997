"""`homing doctor`: finds what would keep a cluster from starting or serving here, with a remedy for each finding.

The checks evaluate facts about the machine (host.py), the settings and a running cluster, and change nothing. Exit code
1 if there are errors; 0 for warnings alone.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ... import __version__
from ...replica.config import ReplicaSettings
from ...replica.demo import demo_model_path
from ...replica.errors import StartupError
from ...replica.kernels.toolchain import REMEDY
from ...replica.load.preflight import weight_bytes
from ..client import get_json
from ..config import Settings, replaced, state_folder
from ..devices import resolve_devices
from ..errors import ClusterError, SettingsError
from ..flags import NOTHING, AllSettings, Out, option, settings_of
from ..host import SERVE_PACKAGES, DiskInfo, MachineInfo, inspect_machine
from ..model_source import DEMO, find_model, text_folder
from ..output import show, table
from ..preflight import (
    check_bounds,
    check_folder,
    check_front,
    check_gpus,
    check_keys,
    exposures,
    prepare,
    template_problems,
)
from ..registry import ClusterRegistry, RegistryEntry
from ..runtime import FEW_OPEN_FILES

GIB = 1 << 30
MIB = 1 << 20
#: Space for one log, one run folder and one small model. Not measured.
DISK_ERROR_BYTES, DISK_WARNING_BYTES = GIB // 4, 5 * GIB
#: The smallest size that Ray accepts for its object store.
SHARED_MEMORY_BYTES = 80 * MIB
SEE_STATUS = "homing status shows what each replica waits for"
CORRECT_SETTING = "correct the setting or its file: docs/settings.md"

Level = Literal["ok", "warning", "error"]


@dataclass(slots=True, frozen=True)
class Finding:
    check: str
    level: Level
    message: str
    remedy: str = ""


def doctor(
    model: Annotated[str | None, option("the model to be served")] = None,
    /,
    *,
    flags: AllSettings = NOTHING,
    out: Out,
    as_json: Annotated[bool, option("print a list of findings, for programs", "--json")] = False,
) -> int:
    """Check the machine, the settings and a running cluster; returns the exit code."""
    settings = settings_of(flags, model)
    entry = ClusterRegistry(state_folder(settings)).live(settings.cluster.name)
    host = inspect_machine(_folders(settings))
    findings = [*examine_host(host, settings), *examine_settings(settings, entry), *_examine_cluster(entry)]
    if as_json:
        out.write(msgspec.json.format(msgspec.json.encode(findings)).decode() + "\n")
    else:
        show(out, render(findings))
    return 1 if any(finding.level == "error" for finding in findings) else 0


def render(findings: Iterable[Finding]) -> Table:
    """A table with a row for each finding, its remedy below the message."""
    signs = {"ok": Text("ok", "green"), "warning": Text("!", "bold yellow"), "error": Text("✗", "bold red")}
    rows: list[Sequence[RenderableType]] = []
    for finding in findings:
        remedy = f"\n→ {finding.remedy}" if finding.remedy else ""
        rows.append((signs[finding.level], finding.check, finding.message + remedy))
    return table(("", "", ""), rows)


# The machine


def examine_host(host: MachineInfo, settings: Settings) -> list[Finding]:
    settings = resolve_devices(settings, () if settings.cluster.ray_address else (float(host.gpus_seen),))
    checks = (_versions, _gpus, _gpu_memory, _compiler, _cpu_kernels, _memory, _shared_memory, _files, _clock, _token)
    return [*(check(host, settings) for check in checks), *map(_disk, host.disks)]


def _versions(host: MachineInfo, settings: Settings) -> Finding:
    python = ".".join(map(str, host.python))
    if host.python < (3, 11):
        return Finding("environment", "error", f"Python {python} is too old", "use Python 3.11 or newer")
    missing = [name for name, version in host.packages.items() if version is None]
    if missing and set(missing) <= set(SERVE_PACKAGES):
        if settings.router.backend or settings.router.engines:
            return Finding("environment", "ok", f"Python {python}, without homing[serve]: only a router")
        return Finding("environment", "error", f"not installed: {', '.join(missing)}", "pip install 'homing[serve]'")
    if missing:
        remedy = f"make setup in a checkout, else: pip install {' '.join(missing)}"
        return Finding("environment", "error", f"not installed: {', '.join(missing)}", remedy)
    versions = ", ".join(f"{name} {host.packages[name]}" for name in ("ray", "torch", "transformers"))
    return Finding("environment", "ok", f"Python {python}, {versions}")


def _gpus(host: MachineInfo, settings: Settings) -> Finding:
    ranks = sum(each.ranks for each in settings.each_model)
    needed = sum(each.ranks * each.cluster.gpus_per_rank for each in settings.each_model)
    if host.gpus_seen and not host.gpus_usable:
        message = f"the driver reports {host.gpus_seen} GPUs, but torch finds none"
        remedy = "install a CUDA build of torch and a driver that is new enough for it: docs/gpu.md"
        return Finding("gpus", "error", message, remedy)
    if not settings.cluster.ray_address and needed > host.gpus_usable:
        message = f"{ranks} ranks need {needed:g} GPUs, this machine has {host.gpus_usable}"
        return Finding("gpus", "error", message, "lower --replicas, --tensor-parallel-size or --gpus-per-rank")
    return Finding("gpus", "ok", f"{host.gpus_usable} usable, {needed:g} needed")


def _gpu_memory(host: MachineInfo, settings: Settings) -> Finding:
    if not host.gpu_bytes or settings.cluster.ray_address:
        return Finding("gpu memory", "ok", "not checked: no GPU here reports its memory")
    try:
        for each in settings.each_model:
            if (folder := _folder(each.replica)).is_dir():
                check_gpus(folder, each, host.gpu_bytes, host.gpu_capability)
    except ClusterError as error:
        return _refused("gpu memory", error, "raise --tensor-parallel-size")
    return Finding("gpu memory", "ok", f"weights fit into {max(host.gpu_bytes) / GIB:.0f} GiB per GPU")


def _compiler(host: MachineInfo, settings: Settings) -> Finding:  # noqa: ARG001 - all checks have the same signature
    if not host.gpus_seen:
        return Finding("compiler", "ok", "no GPU here, so Triton launches no kernels")
    if host.launcher_problem:
        message = f"Triton cannot launch kernels on the GPUs: {host.launcher_problem}"
        return Finding("compiler", "error", message, REMEDY)
    return Finding("compiler", "ok", "Triton has the C compiler and Python headers that its launcher needs")


def _cpu_kernels(host: MachineInfo, settings: Settings) -> Finding:  # noqa: ARG001
    return Finding("cpu kernels", "ok", "\n".join(host.cpu_kernels) or "plain torch: numba cannot compile them here")


def _memory(host: MachineInfo, settings: Settings) -> Finding:
    on_cpu = [each for each in settings.each_model if not each.cluster.gpus_per_rank]
    tiers = sum(each.cluster.replicas * each.kvcache.host_kv_memory for each in settings.each_model)
    if settings.cluster.ray_address or not (on_cpu or tiers):
        return Finding("memory", "ok", f"{host.memory_bytes / GIB:.1f} GiB available here")
    ranks = sum(each.ranks for each in on_cpu)
    kv = sum(each.ranks * each.kvcache.kv_cache_bytes for each in on_cpu if not each.kvcache.num_kv_blocks)
    weights = sum(each.ranks * _weight_bytes(each.replica) for each in on_cpu)
    needed = f"{kv / GIB:.1f} GiB for KV and {weights / GIB:.1f} for weights"
    remedy = "lower --kv-cache-bytes or --replicas, or use --dtype bfloat16"
    if tiers:
        needed, remedy = f"{needed} and {tiers / GIB:.1f} for evicted blocks", f"lower --host-kv-memory; {remedy}"
    message = f"{ranks} ranks need {needed}, {host.memory_bytes / GIB:.1f} GiB are available"
    if kv + weights + tiers > host.memory_bytes:
        return Finding("memory", "error", message, remedy)
    return Finding("memory", "ok", message)


def _weight_bytes(replica: ReplicaSettings) -> int:
    """The size of the weights; 0 if unknown: a Hugging Face name, or a damaged folder, which `_model` reports."""
    try:
        return weight_bytes(_folder(replica), replica)
    except StartupError:
        return 0


def _folder(replica: ReplicaSettings) -> Path:
    """The model's folder; it does not exist for a Hugging Face name."""
    return demo_model_path() if replica.model == DEMO else Path(replica.model).expanduser()


def _shared_memory(host: MachineInfo, settings: Settings) -> Finding:  # noqa: ARG001
    size = host.shared_memory_bytes
    found = "there is no /dev/shm" if size is None else f"/dev/shm has {size / MIB:.0f} MiB"
    if (size or 0) < SHARED_MEMORY_BYTES:
        message = f"{found}; Ray needs {SHARED_MEMORY_BYTES / MIB:.0f} MiB and otherwise uses the disk"
        return Finding("shared memory", "warning", message, "in a container: --shm-size=1g")
    return Finding("shared memory", "ok", found)


def _files(host: MachineInfo, settings: Settings) -> Finding:  # noqa: ARG001
    if 0 <= host.open_files < FEW_OPEN_FILES:
        message = f"a process may open at most {host.open_files} files: many clients would be refused"
        return Finding("file limits", "warning", message, "as root: ulimit -Hn 65536; or LimitNOFILE= of the service")
    return Finding("file limits", "ok", f"{host.open_files} open files")


def _clock(host: MachineInfo, settings: Settings) -> Finding:  # noqa: ARG001
    if host.clock_synchronized is None:
        return Finding("clock", "ok", "the kernel does not report whether it is synchronised")
    if not host.clock_synchronized:
        message = "the clock is not synchronised: certificates may fail and logs of several nodes may not match"
        return Finding("clock", "warning", message, "run chrony or systemd-timesyncd on every node")
    return Finding("clock", "ok", "synchronised")


def _token(host: MachineInfo, settings: Settings) -> Finding:
    if host.token_mode is None and settings.cluster.ray_address:
        remedy = "copy ~/.ray/auth_token of the head here, or set RAY_AUTH_TOKEN_PATH"
        return Finding("auth", "warning", "Ray has no token here", remedy)
    if host.token_mode is None:
        return Finding("auth", "ok", "Ray has no token here; a local cluster creates one")
    if host.token_mode & 0o077:
        message = f"other users can read Ray's token (mode {host.token_mode:o}): with it they can run code"
        return Finding("auth", "warning", message, "chmod 600 ~/.ray/auth_token")
    return Finding("auth", "ok", "Ray's token exists, and only its owner can read it")


def _disk(disk: DiskInfo) -> Finding:
    message = f"{disk.free_bytes / GIB:.1f} GiB free for {disk.use} in {disk.folder}"
    if disk.free_bytes >= DISK_WARNING_BYTES:
        return Finding("disk", "ok", message)
    level: Level = "error" if disk.free_bytes < DISK_ERROR_BYTES else "warning"
    return Finding("disk", level, message, f"free space in {disk.folder}")


# The settings


def examine_settings(settings: Settings, entry: RegistryEntry | None) -> list[Finding]:
    """Check for settings that `homing serve` would refuse. `entry`: of a running cluster with this name."""
    models = _running_models(settings, entry) or settings.each_model
    return [_values(settings), _port(settings, entry), *chain.from_iterable(map(_model, models)), _access(settings)]


def _running_models(settings: Settings, entry: RegistryEntry | None) -> list[Settings]:
    """The settings of the models that the running cluster serves; empty if these settings name others."""
    if entry is None or settings.models or settings.replica.model != DEMO:
        return []
    return [replaced(settings, model=source, served_model_name=name) for name, source in entry.sources]


def _values(settings: Settings) -> Finding:
    try:
        for each in prepare(settings).each_model:
            check_bounds(each, f"model {each.served_name}: " if settings.models else "")
    except ClusterError as error:
        return _refused("settings", error, CORRECT_SETTING)
    return Finding("settings", "ok", "bounds agree, and the files that they name are there")


def _port(settings: Settings, entry: RegistryEntry | None) -> Finding:
    router = settings.router
    if entry is not None:
        return Finding("ports", "ok", f"cluster {entry.name} listens on {entry.url or entry.phase}")
    try:
        check_front(router)
    except ClusterError as error:
        return _refused("ports", error, "choose another --port or --host, or correct the setting")
    return Finding("ports", "ok", f"{router.host}:{router.port} is free")


def _model(settings: Settings) -> Iterator[Finding]:
    if settings.cluster.ray_address and not Path(settings.replica.model).expanduser().is_dir():
        yield Finding("model", "ok", "not checked: each node of the joined cluster locates it")
        return
    try:
        folder = find_model(settings.replica)
        check_folder(folder, settings)
    except SettingsError as error:
        yield _refused("settings", error, CORRECT_SETTING)
        return
    except ClusterError as error:
        yield _refused("model", error, "give a complete model folder, or a name on the Hugging Face hub")
        return
    yield Finding("model", "ok", f"weights, tokenizer and chat template of {settings.replica.model} are complete")
    for problem in template_problems(text_folder(settings.replica, folder), settings.router):
        remedy = "requests with it get this error; another --chat-template may take it"
        yield Finding("template", "warning", problem, remedy)


def _access(settings: Settings) -> Finding:
    router = settings.router
    try:
        check_keys(settings.events)
    except ClusterError as error:
        return _refused("keys", error, "correct the file: docs/events.md")
    if opened := exposures(settings):
        message, _, remedy = opened[0].partition(": ")
        return Finding("keys", "warning", message, remedy)
    return Finding("keys", "ok", "API keys are required" if router.api_keys_file or router.api_key else "loopback only")


def _refused(check: str, error: ClusterError, remedy: str) -> Finding:
    """A finding for an error. Most messages end with their remedy; `remedy` is for those that do not."""
    message, _, own_remedy = str(error).rpartition("; ")
    return Finding(check, "error", message or own_remedy, own_remedy if message else remedy)


# A running cluster


def examine_view(view: Mapping[str, Any]) -> list[Finding]:
    """Findings from the response of /cluster: refused, missing, silent and serving replicas."""
    findings = []
    for row in view["refused"]:
        message = f"{row['replica_id']}: {row['message']}"
        findings.append(Finding("parity", "error", message, "give router and replicas the same model folder"))
    for row in view["absent"]:
        message = f"{row['replica_id']} does not serve: {row['reason']}"
        findings.append(Finding("replicas", "error", message, SEE_STATUS))
    for row in view["replicas"]:
        if row["state"] == "silent" or row["feed"] == "stale":
            message = f"{row['replica_id']} is {row['state']}, its events are {row['feed']}"
            findings.append(Finding("replicas", "warning", message, f"check its node {row['node']}"))
    if not view["refused"]:
        findings.append(Finding("parity", "ok", "tokenizer, template, block size and hashes agree"))
    if not view["models"]:
        findings.append(Finding("replicas", "error", "no replica serves", SEE_STATUS))
    for model in view["models"]:
        if model["serving"]:
            findings.append(Finding("replicas", "ok", f"{model['serving']} serve {model['name']}"))
        else:
            findings.append(Finding("replicas", "error", f"no replica serves {model['name']}", SEE_STATUS))
    return findings


def examine_failure(view: Mapping[str, Any], routers: int) -> Finding:
    """What happens if a process is killed now."""
    alone = [model["name"] for model in view["models"] if model["serving"] == 1]
    if alone:
        message = f"{', '.join(alone)} has one replica: if it is killed, its requests wait until it is back or time out"
        return Finding("failure", "warning", message, "homing scale to 2 or more")
    router = (
        "a router's death breaks the streams of its clients" if routers > 1 else "the router's death breaks all streams"
    )
    message = f"a killed replica's requests continue on another one; {router}, which clients must send again"
    return Finding("failure", "ok", message)


def examine_upgrade(view: Mapping[str, Any], running: str, routers: int) -> Finding:
    """Whether replicas can be replaced now without a failed request. `running`: the version of the cluster."""
    unwell = [row["replica_id"] for row in (*view["absent"], *view["refused"])]
    unwell += [row["replica_id"] for row in view["replicas"] if row["state"] != "serving" or row["feed"] == "stale"]
    if unwell:
        message = f"not now: {', '.join(sorted(set(unwell)))} would be missing besides the replica that is replaced"
        return Finding("upgrade", "warning", message, "wait until homing status shows all of them serving")
    single = [model["name"] for model in view["models"] if model["serving"] == 1]
    if single:
        message = (
            f"{', '.join(single)} has one replica: homing update starts its successor first and needs room for both"
        )
        return Finding("upgrade", "warning", message, "check the room for one more replica, or scale to 2 before")
    if __version__ != running:
        kept = "with --routers 2 or more, one at a time" if routers > 1 else "which breaks its open streams"
        message = f"the cluster runs {running}, this is {__version__}: replicas and then routers restart, {kept}"
        return Finding("upgrade", "ok", message)
    requests = view["in_flight"] + view["waiting"]
    message = f"homing update replaces one replica at a time and waits for its requests; {requests} run now"
    return Finding("upgrade", "ok", message)


def _examine_cluster(entry: RegistryEntry | None) -> list[Finding]:
    if entry is None:
        return [Finding("cluster", "ok", "no cluster of this name is running")]
    if entry.url is None:
        return [Finding("cluster", "ok", f"{entry.name} is {entry.phase} (pid {entry.pid})")]
    try:
        view, version = get_json(f"{entry.url}/cluster"), get_json(f"{entry.url}/version")["version"]
        routers = max(1, len(entry.router_urls))
        return [*examine_view(view), examine_failure(view, routers), examine_upgrade(view, version, routers)]
    except ClusterError as error:
        return [Finding("cluster", "error", str(error), f"see its output: {entry.log or 'in its terminal'}")]


def _folders(settings: Settings) -> dict[str, Path]:
    base = Path("/tmp") if Path("/tmp").is_dir() else Path.cwd()
    folders = {"registry and logs": state_folder(settings), "sockets and Ray's logs": base}
    if all(each.replica.model == DEMO for each in settings.each_model):
        return folders
    # Imported here because the hub's client is slow to import and only needed here.
    from huggingface_hub.constants import HF_HOME

    return folders | {"models": Path(HF_HOME)}
