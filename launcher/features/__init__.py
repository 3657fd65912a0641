"""The features: what the launcher does beside its core, one folder each. Nothing else in the core names one.

An entry of the table is the only way from the core to a feature; it says where the feature fills a hook of the core. A
feature is imported when it is used. A feature may use all of the core, and no other feature.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class FeatureCommand:
    """A command of the launcher: a typed function, as typer reads it."""

    module: str
    attribute: str
    help: str
    after: str  # the command of the core that precedes it in --help


@dataclass(frozen=True)
class FeatureCluster:
    """A kind of cluster of the settings file: a value of type launcher.run.cluster.Kind."""

    module: str
    attribute: str


@dataclass(frozen=True)
class ClusterEngine:
    """How a kind of cluster is reached: a function of type launcher.node.connect.ReachCluster."""

    module: str
    attribute: str


@dataclass(frozen=True)
class ClusterCauses:
    """What a kind of cluster says of the end of a run: a sequence of type launcher.run.end.explain.Explanation."""

    module: str
    attribute: str


@dataclass(frozen=True)
class Export:
    """A target of `launcher export`: a value of type launcher.export.target.Target."""

    module: str
    attribute: str
    help: str  # what it prints


@dataclass(frozen=True)
class Option:
    """Options of a command of the core: the keyword-only parameters of a function, as typer reads them.

    The command defines what it calls the function with, and what it gets: launcher.cli.doctor.Option,
    launcher.cli.fetch.Option, launcher.cli.up.Option.
    """

    module: str
    attribute: str
    after: str  # the parameter of the command that precedes them in --help


@dataclass(frozen=True)
class FeatureStep:
    """A step between image and plan, for jobs that have a key: of type launcher.run.begin.prepare.PreparingStep."""

    module: str
    attribute: str


@dataclass(frozen=True)
class JobCheck:
    """A check of doctor, for jobs that have a key: of type launcher.run.doctor.JobCheck."""

    module: str
    attribute: str


def load(
    entry: FeatureCluster | ClusterEngine | ClusterCauses | FeatureCommand | Export | JobCheck | Option | FeatureStep,
) -> Any:
    """Import what an entry names."""
    return getattr(importlib.import_module(entry.module), entry.attribute)


@dataclass(frozen=True)
class Feature:
    """What a feature adds to the core, by name."""

    causes: Mapping[str, ClusterCauses] = field(default_factory=dict)  # by `kind` in the settings file
    clusters: Mapping[str, FeatureCluster] = field(default_factory=dict)  # by `kind` in the settings file
    commands: Mapping[str, FeatureCommand] = field(default_factory=dict)
    engines: Mapping[str, ClusterEngine] = field(default_factory=dict)  # by `kind` in the settings file
    exports: Mapping[str, Export] = field(default_factory=dict)
    options: Mapping[str, Option] = field(default_factory=dict)  # by command
    steps: Mapping[str, FeatureStep] = field(default_factory=dict)  # by key of the job file
    checks: Mapping[str, JobCheck] = field(default_factory=dict)  # by key of the job file


FEATURES: Mapping[str, Feature] = {
    "bench": Feature(options={"doctor": Option("launcher.features.bench.option", "options", after="nodes")}),
    "compare": Feature(
        commands={
            "compare": FeatureCommand(
                "launcher.features.compare.command",
                "compare",
                "Compare the speed, accuracy and scaling of runs.",
                after="tensorboard",
            )
        },
        options={"fetch": Option("launcher.features.compare.best", "options", after="checkpoints")},
    ),
    "data": Feature(
        commands={
            "data": FeatureCommand(
                "launcher.features.data.command",
                "data",
                "Copy data to nodes; list, verify and remove copies.",
                after="image",
            )
        },
        steps={"data": FeatureStep("launcher.features.data.job", "bring_data")},
        checks={"data": JobCheck("launcher.features.data.job", "check_data")},
    ),
    "report": Feature(
        commands={
            "report": FeatureCommand(
                "launcher.features.report.command",
                "report",
                "Write a masked archive of a run for a bug report.",
                after="clean",
            )
        }
    ),
    "slurm": Feature(  # before kubernetes: so are the targets of `export` listed
        causes={"slurm": ClusterCauses("launcher.features.slurm.causes", "CAUSES")},
        clusters={"slurm": FeatureCluster("launcher.features.slurm.cluster", "SLURM")},
        engines={"slurm": ClusterEngine("launcher.features.slurm.engine", "reach")},
        exports={"slurm": Export("launcher.features.slurm.targets", "SLURM", "an sbatch script")},
    ),
    "sweeps": Feature(options={"up": Option("launcher.features.sweeps.option", "options", after="raw")}),
    "kubernetes": Feature(
        exports={
            "jobset": Export("launcher.features.kubernetes.targets", "JOBSET", "Kubernetes manifests"),
            "job": Export("launcher.features.kubernetes.targets", "JOB", "Kubernetes manifests"),
        }
    ),
}
