"""Settings of a simulated server, from which a scenario is made: costs, methods, memory and links."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from phasewise import catalog
from phasewise.cluster.launcher import WorkerSpec
from phasewise.errors import UserError, near
from phasewise.options import DEFAULTS
from phasewise.plan.beside import Beside, both, over
from phasewise.plan.cost import Cost
from phasewise.plan.device import device
from phasewise.plan.drafts import NONE, Drafts
from phasewise.plan.gpu_tables import PREFIX, Place, TableCost, table_cost
from phasewise.plan.layout import Layout
from phasewise.plan.link import LOCAL, Link
from phasewise.plan.profile import Profile
from phasewise.plan.roofline import Roofline
from phasewise.plan.serving import Serving
from phasewise.plan.shape import DecoderShape
from phasewise.plan.simulate import Scenario
from phasewise.plan.simulated_cluster import ClusterLayout
from phasewise.plan.simulated_engine import EngineSettings
from phasewise.verbs.schedule import Scheduler


@dataclass(frozen=True)
class CostsByRole:
    """A source of costs. `cost`: of a role with so many threads; `kv_bytes`: what a role's worker has for KV, None
    where that is the user's to say; `beside`: how workers of so many threads slow each other down, `shared`: on the
    same cores; `served`: what a server adds, by whether it has workers; `machine`: all workers of a server share one
    device, a machine's cores; `stages`: in which a worker's steps follow each other through the layers; `devices`: of a
    worker, `price` and `power` of all of these, $/h and W, 0 where the source does not say."""

    cost: Callable[[str, int | None], Cost]
    kv_bytes: Callable[[str], int | None]
    row_bytes: int
    layers: int
    cores: int
    beside: Callable[[int | None], Beside] = lambda threads: {}
    shared: Callable[[int | None], Beside] = lambda threads: {}
    served: Callable[[bool], Serving] = lambda workers: Serving()
    machine: bool = False
    stages: Callable[[str], int] = lambda role: 1
    devices: Callable[[str], int] = lambda role: 1
    price: Callable[[str], float] = lambda role: 0.0
    power: Callable[[str], float] = lambda role: 0.0


def measured(profile: Profile, recipe: str = "") -> CostsByRole:
    """A machine as it was measured."""

    def cost(role: str, threads: int | None) -> Cost:
        return profile.of(recipe, threads).cost

    one = profile.of(recipe)
    return CostsByRole(
        cost, lambda role: None, one.row_bytes, profile.shape.layers, int(profile.machine.get("cores", 1)),
        lambda threads: profile.of(recipe, threads).beside, lambda threads: profile.of(recipe, threads).shared,
        lambda workers: profile.served.get("workers" if workers else "engine", Serving()), machine=True,
    )  # fmt: skip


def known(
    devices: Mapping[str, str], ways: int, shape: DecoderShape, stages: int = 1, layouts: Sequence[Layout] = ()
) -> CostsByRole:
    """Devices by their files, or measured, by role; "" stands for all roles that are not named. Roles of `layouts` have
    degrees of their own, and may have another kind of device. Raises UserError."""

    def priced(name: str, ways: int, stages: int) -> Roofline | TableCost:
        if not name.startswith(PREFIX):
            return Roofline(device(name), shape, ways, stages)
        if stages > 1:
            raise UserError(f"stages={stages}: {PREFIX} has no steps in stages; take a device file, or one stage")
        return table_cost(Place.parse(name), shape, ways)

    def named(role: str) -> str:
        found = devices.get(role, devices.get(""))
        if found is None:
            raise UserError(f"no device is given for {role} workers: add {role}=DEVICE, or name one for all")
        return found

    rest = Layout("", ways, stages)
    own = {one.role: one for one in layouts}
    # without layouts every named device is tried at once; with them, the degrees of the rest may fit no role
    made = {} if own else {role: priced(name, ways, stages) for role, name in devices.items()}
    made |= {role: priced(one.device or named(role), one.ways, one.stages) for role, one in own.items()}

    def of(role: str) -> Roofline | TableCost:
        if role not in made:
            made[role] = made[""] if "" in made else priced(named(role), ways, stages)
        return made[role]

    def spent(what: str) -> Callable[[str], float]:
        def sums(role: str) -> float:
            cost = of(role)
            one: float = getattr(cost.device, what) if isinstance(cost, Roofline) else 0.0
            return one * own.get(role, rest).devices

        return sums

    return CostsByRole(
        lambda role, threads: of(role), lambda role: int(of(role).kv_bytes), int(shape.row_bytes), shape.layers, 1,
        stages=lambda role: own.get(role, rest).stages, devices=lambda role: own.get(role, rest).devices,
        price=spent("price"), power=spent("power"),
    )  # fmt: skip


def devices(text: str) -> dict[str, str]:
    """{role: device} from DEVICE, or from ROLE=DEVICE,... Raises UserError."""
    found: dict[str, str] = {}
    for part in text.split(","):
        role, equals, name = part.rpartition("=")
        if role in found:
            raise UserError(f"devices {text!r}: {role or 'all roles'} are named twice")
        if equals and not role:
            raise UserError(f"devices {text!r}: write DEVICE, or ROLE=DEVICE,ROLE=DEVICE")
        found[role] = name
    return found


@dataclass(frozen=True)
class ServerSetting:
    """Methods and limits of a simulated server. `kv_bytes`: of all workers together, None: what their devices have."""

    schedule: str = DEFAULTS["schedule"]
    place: str = DEFAULTS["place"]
    kv_bytes: int | None = None
    max_running: int = 64
    prefix_cache: bool = True
    link: Link = LOCAL
    revive: float = 1.0
    drafts: Drafts = NONE

    def scenario(self, source: CostsByRole, replicas: int, deaths: Sequence[tuple[float, int]], seed: int) -> Scenario:
        """Raises UserError for what does not fit together."""
        if self.max_running < 1 or replicas < 1:
            raise UserError(f"max_running={self.max_running} and replicas={replicas} must be at least 1")

        def budget(spec: WorkerSpec) -> int:
            own = source.kv_bytes(spec.role)
            if self.kv_bytes is not None or own is None:
                return int(self._budget() * spec.share)
            return own

        engine = EngineSettings(self._scheduler(), source.row_bytes, source.layers, self.max_running,
                                self.prefix_cache, self.drafts,
                                decodes_all=catalog.build("schedule", self.schedule).traits.decodes_all)  # fmt: skip
        placing, cores = catalog.build("place", self.place), range(source.cores)
        workers = placing.traits.launches
        served = source.served(workers)
        layout = ClusterLayout(
            engine, cache(source.cost), budget, self.link, self.revive,
            lambda threads: both(source.beside(threads), served.beside),
            lambda threads: over(source.shared(threads), served.beside, source.beside(threads)), served, source.stages,
        )  # fmt: skip
        made = Scenario(layout, placing, cores, replicas, deaths, seed, served.lag)
        policy = made.policy()
        for role in {"all"} if policy is None else {spec.role for spec in policy.worker_specs()}:
            source.cost(role, None)
        return made

    def _budget(self) -> int:
        from phasewise.engine.limits import memory_default

        return memory_default() if self.kv_bytes is None else self.kv_bytes

    def _scheduler(self) -> Callable[[], Scheduler]:
        made: Any = catalog.build("schedule", self.schedule)
        return lambda: made.bind(None)


def deaths(texts: Sequence[str]) -> list[tuple[float, int]]:
    """(seconds, worker) from WORKER@SECONDS. Raises UserError."""
    found = []
    for text in texts:
        worker, at, when = text.partition("@")
        try:
            found.append((float(when), int(worker)))
        except ValueError:
            at = ""
        if not at or not 0 <= found[-1][0] < float("inf"):
            raise UserError(f"{text!r} does not say which worker dies when: write WORKER@SECONDS, such as 1@30")
    return found


def unknown_role(roles: Sequence[str], given: Mapping[str, str]) -> None:
    """Raise UserError for a device given to a role that the placement does not have."""
    for role in given:
        if role and role not in roles:
            raise UserError(f"a device is given for {role!r} workers, but the placement has none. {near(role, roles)}")
