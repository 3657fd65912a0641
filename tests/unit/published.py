"""What the write-ups of the five experiments publish, and ffcv for ImageNet, as options and keys of our jobs.

A row of PUBLISHED is one run of a job: an option of the trainer, or `nodes`, `gpus`, `processes`, `image`. What they do
not publish is not in it. DIFFERENT: what we set otherwise than published. OURS: what a job sets that is not published.
"""

from __future__ import annotations

Row = dict[str, object]

THEIR_IMAGE = "nvcr.io/nvidia/pytorch:19.06-py3"
OUR_IMAGE = "nvcr.io/nvidia/pytorch:26.09-py3"


def rows(common: Row, *each: Row) -> tuple[Row, ...]:
    return tuple(common | row for row in each)


# the example script of PyTorch of that time: fp32 without TF32, decay on everything, a rate that falls by epochs only
SCRIPT: Row = {
    "image": THEIR_IMAGE,
    "nodes": 1,
    "arch": "resnet50",
    "epochs": 1,
    "lr": 0.01,
    "lr_scaling": "none",
    "schedule": "multistep",
    "warmup": 0.0,
    "milestones": (1.0,),
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "decay": "all",
    "amp": "none",
    "tf32": False,
    "zero_init_residual": False,
}
# the linked script and logs of experiment 1
RESNET18: Row = {
    "gpus": 1,
    "arch": "resnet18",
    "zero_init_residual": False,
    "weight_decay": 3e-5,
    "decay": "all",
    "augment": "crop",
    "flip": 0.0,
    "val_resize": 0,  # 256 for crops of 224
    "image_size": 224,
    "mean": (0.47889522, 0.47227842, 0.43047404),
    "std": (0.229, 0.224, 0.225),
    "batch_size": 256,
    "val_batch_size": 64,
    "workers": 6,
    "lr": 1.0,
    "lr_scaling": "none",
    "schedule": "onecycle",
    "warmup": -1.0,  # OneCycleLR's 0.3
    "cycle_momentum": True,
    "optimizer": "sgd",
    "nesterov": False,
    "amp": "O2",
    "published_tags": True,
    "syncbn": "none",
    "label_smoothing": 0.0,
    "ema_decay": 0.0,
}
DUAL: Row = {
    "nodes": 1,
    "arch": "cifar_resnet18",
    "epochs": 140,
    "milestones": (0.5714286, 0.8571429),  # after rounds 80 and 120
    "schedule": "multistep",
    "warmup": 0.0,
    "gamma": 0.2,
    "batch_size": 1000,
    "lr": 0.1,
    "lr_scaling": "none",
    "momentum": 0.9,
    "weight_decay": 0.0,
    "augment": "shift",
    "flip": 0.5,
    "val_batch_size": 0,  # as --batch-size: 1000
    "parallel": "dual_batch",
    "dual_merge": "asp",
    "dual_variant": "published",
    "dual_a": (0.00022595,),
    "dual_b": (0.006233854698278141,),
}
NORM: Row = {"nodes": 1, "gpus": 2, "processes": 2, "epochs": 10, "batch_size": 64, "lr_scaling": "none"}
MOBILENET: Row = {
    "nodes": 1,
    "arch": "cifar_mobilenet_v2",
    "weight_decay": 1e-4,
    "decay": "all",
    "schedule": "cosine",
    "clip_norm": 0.0,
}
FOUR: Row = {"gpus": 4, "batch_size": 512, "lr": 0.4, "lr_scaling": "none", "warmup": 0.0}
# libffcv/ffcv-imagenet: train_imagenet.py and its configurations
FFCV: Row = {
    "nodes": 1,
    "blurpool": True,
    "zero_init_residual": False,
    "optimizer": "sgd",
    "momentum": 0.9,
    "nesterov": False,
    "decay": "where the name has no bn",
    "label_smoothing": 0.1,
    "lr_scaling": "none",
    "schedule": "linear",  # "cyclic": up to the peak in 2 epochs, from 1e-4 of it, then down to 0
    "warmup_start": 1e-4,
    "last_batch": "drop",
    "augment": "crop",
    "crop_scale": 0.08,
    "flip": 0.5,
    "mean": (0.485, 0.456, 0.406),
    "std": (0.229, 0.224, 0.225),
    "image_size": 256,
    "val_resize": 293,  # 256 x 256/224
    "val_flip": True,
    "val_batch_size": 512,
    "amp": "fp16",
    "ema_decay": 0.0,
    "syncbn": "none",
}
FFCV_50: Row = FFCV | {"gpus": 8, "arch": "resnet50", "batch_size": 512, "lr": 1.7, "weight_decay": 1e-4}
FFCV_18: Row = FFCV | {"gpus": 1, "arch": "resnet18", "batch_size": 1024, "lr": 0.5, "weight_decay": 5e-5}

PUBLISHED: dict[str, tuple[Row, ...]] = {
    "e0_single": rows(SCRIPT | {"gpus": 1, "processes": 1, "workers": 4}, {"batch_size": 256}, {"batch_size": 128}),
    "e0_dp": rows(
        SCRIPT | {"gpus": 4, "processes": 1, "parallel": "dp", "workers": 16}, {"batch_size": 256}, {"batch_size": 1024}
    ),
    "e0_ddp": rows(  # batches of 1024 and 256 in all, loader workers 16 and 4 in all
        SCRIPT | {"gpus": 4, "processes": 4, "parallel": "auto"},
        {"batch_size": 256, "workers": 4},
        {"batch_size": 64, "workers": 1},
    ),
    "vgg16_cifar10": (  # "m1: [400 x 512]" on each of four replicas
        {
            "image": THEIR_IMAGE,
            "nodes": 1,
            "gpus": 4,
            "processes": 1,
            "parallel": "dp",
            "arch": "vgg16",
            "image_size": 32,
            "batch_size": 1600,
        },
    ),
    "e1_1node": rows(RESNET18 | {"nodes": 1}, {"epochs": 2}),
    "e1_2node": rows(RESNET18 | {"nodes": 2}, {"epochs": 2}, {"epochs": 6}),
    "e2_dual_batch": rows(
        DUAL | {"gpus": 5, "processes": 6},
        *({"dual_small": small, "dual_ratio": 1.05 if small else 1.0} for small in range(6)),
    ),
    "e2_dual_batch_6": rows(
        DUAL | {"gpus": 6, "processes": 7},
        *({"dual_small": small, "dual_ratio": 1.05 if small else 1.0} for small in range(7)),
    ),
    "e3_syncbn": rows(
        NORM,
        {"syncbn": "custom", "accumulate": 1, "metrics": "exact"},
        {"syncbn": "library", "accumulate": 1, "metrics": "exact"},
        {"syncbn": "custom", "accumulate": 1, "metrics": "scatter"},
        {"syncbn": "custom", "accumulate": 2, "metrics": "exact"},
        {"syncbn": "library", "accumulate": 2, "metrics": "exact"},
    ),
    "e4_batches": rows(
        MOBILENET | {"gpus": 1, "lr": 0.1, "lr_scaling": "linear", "lr_reference_batch": 256},
        *({"batch_size": batch} for batch in (128, 256, 512, 1024, 2048)),
    ),
    "e4_nobn": rows(
        MOBILENET
        | {"arch": "cifar_mobilenet_v2_nobn", "gpus": 1, "schedule": "linear", "warmup": 0.0, "lr_scaling": "none"},
        {"batch_size": 512, "lr": 0.2},
        {"batch_size": 2048, "lr": 0.8},
    ),
    "e4_model": rows(MOBILENET | FOUR | {"processes": 4, "parallel": "model"}, {}),
    "e4_dp": rows(MOBILENET | FOUR | {"processes": 1, "parallel": "dp"}, {}),
    # not published; what it adds to e4_model is the micro-batches
    "e4_pipeline": rows(MOBILENET | FOUR | {"processes": 4, "parallel": "pipeline"}, {}, {}),
    "imagenet_rn50_16": (FFCV_50 | {"epochs": 16, "warmup": 0.125},),
    "imagenet_rn50_32": (FFCV_50 | {"epochs": 32, "warmup": 0.0625},),
    "imagenet_rn50_88": (FFCV_50 | {"epochs": 88, "warmup": 0.0227273},),
    "imagenet_rn18_16": (FFCV_18 | {"epochs": 16, "warmup": 0.125},),
}

NEWER = "of 2019, its torch is too old for this trainer"
DIFFERENT: dict[str, dict[str, tuple[object, str]]] = {  # job -> field -> our value, and why
    job: {"image": (OUR_IMAGE, NEWER)} for job in ("e0_single", "e0_dp", "e0_ddp", "vgg16_cifar10")
}
FFCV_DIFFERENT: dict[str, tuple[object, str]] = {
    "decay": ("weights", "theirs decays biases, and the norms whose names lack bn: those of the downsampling"),
    "lr_scaling": ("linear", "the published rate at the published batch, and valid for other numbers of GPUs"),
    "amp": ("auto", "bf16, where the GPU has it, needs no loss scale"),
}
DIFFERENT |= {
    job: FFCV_DIFFERENT | {"gpus": ("all", "those of the machine")} if "rn50" in job else FFCV_DIFFERENT
    for job in PUBLISHED
    if job.startswith("imagenet")
}

SMALL_IMAGES = {"image_size": "of CIFAR", "val_resize": "of CIFAR", "augment": "the usual one of CIFAR"}
OURS: dict[str, dict[str, str]] = {  # job -> option -> why it is set, though it is not published
    **{
        job: {"lr_reference_batch": "the published batch", "phases": "compared by itself, epoch by epoch"}
        for job in PUBLISHED
        if job.startswith("imagenet")
    },
    "vgg16_cifar10": {
        **SMALL_IMAGES,
        "epochs": "only the failure is published",
        "lr": "only the failure is published",
        "lr_scaling": "the rate is that of the batch as it is",
        "amp": "fp32, as in the rest of experiment 0",
    },
    "e2_dual_batch": SMALL_IMAGES,
    "e2_dual_batch_6": SMALL_IMAGES,
    "e3_syncbn": {**SMALL_IMAGES, "arch": "not named; as small as its memory says", "lr": "not published"},
    "e4_batches": {**SMALL_IMAGES, "epochs": "not published"},
    "e4_nobn": {**SMALL_IMAGES, "epochs": "not published"},
    "e4_model": {**SMALL_IMAGES, "epochs": "not published"},
    "e4_dp": {**SMALL_IMAGES, "epochs": "not published"},
    "e4_pipeline": {
        **SMALL_IMAGES,
        "epochs": "not published",
        "micro_batches": "ours",
        "pipeline_schedule": "ours",
        "last_batch": "its schedules have a fixed batch size",
    },
}

# the user's main job beside the published one: option -> imagenet_*node's value, e1_*node's
MAIN_JOB: dict[str, tuple[object, object]] = {
    "arch": ("resnet50", "resnet18"),
    "zero_init_residual": (True, False),
    "weight_decay": (1e-4, 3e-5),
    "decay": ("weights", "all"),
    "flip": (0.5, 0.0),
    "mean": ((0.485, 0.456, 0.406), (0.47889522, 0.47227842, 0.43047404)),
    "val_batch_size": (0, 64),
    "workers": (-1, 6),
}
