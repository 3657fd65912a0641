"""The job file: what the user asked for, loaded with line-numbered errors, as frozen values."""

from launcher.job.argv import Args, ArgValue, argv_of
from launcher.job.dump import dump_job
from launcher.job.files import check_files, code_folder, read_secrets, script_in_code
from launcher.job.loader import load_job, parse_job
from launcher.job.models import DockerOptions, Image, Job, NodeEntry, Resources, Run, Secret
from launcher.job.scalars import Gpus
from launcher.job.schema import json_schema, template
from launcher.job.sweep import expand_sweep, variant_name

__all__ = [
    "ArgValue",
    "Args",
    "DockerOptions",
    "Gpus",
    "Image",
    "Job",
    "NodeEntry",
    "Resources",
    "Run",
    "Secret",
    "argv_of",
    "check_files",
    "code_folder",
    "dump_job",
    "expand_sweep",
    "json_schema",
    "load_job",
    "parse_job",
    "read_secrets",
    "script_in_code",
    "template",
    "variant_name",
]
