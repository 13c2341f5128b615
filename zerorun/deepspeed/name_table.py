"""DeepSpeed's names: which module has which, and where zerorun has them. Plain data, which needs no torch.

A name that is neither here nor in ``MISSING`` is one that no client of DeepSpeed known to us uses.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

VERSION = "0.19.8"  # the DeepSpeed whose names these are; clients compare it with what they need


def _names(**homes: str) -> dict[str, str]:
    """Return name -> "module:name". Each keyword is a module of zerorun, with __ for a dot, and the value names in it.

    ``new=old`` in a value: DeepSpeed says ``new`` where zerorun says ``old``.
    """
    found = {}
    for home, names in homes.items():
        path = f"zerorun.{home.replace('__', '.')}" if home != "torch" else "torch.distributed"
        for name in names.split():
            new, _, old = name.partition("=")
            found[new] = f"{path}:{old or new}"
    return found


_INIT = _names(zero__init="Init", deepspeed__parameters="GatheredParameters=GatheredBlock")
_STATUS = _names(deepspeed__parameters="ZeroParamStatus ZeroParamType")
_EXTERNAL = _names(zero__external_parameters="register_external_parameter unregister_external_parameter")
_PIPE = _names(pipeline__module="PipelineModule", pipeline__layer_spec="LayerSpec TiedLayerSpec")
_LOG = _names(
    log="logger=script_logger", deepspeed__helpers="log_dist log_dist_once set_log_level_from_string warning_once"
)
_CHECKPOINTING = _names(
    activations__checkpointing="checkpoint non_reentrant_checkpoint is_configured reset",
    deepspeed__checkpointing_names="configure get_cuda_rng_tracker model_parallel_cuda_manual_seed _set_cuda_rng_state "
    "_CUDA_RNG_STATE_TRACKER _MODEL_PARALLEL_RNG_TRACKER_NAME",
)
_ENGINE = _names(engine__engine="DeepSpeedEngine=Engine")
_TOPOLOGY = _names(
    distributed__process_topology="ProcessTopology PipeDataParallelTopology PipeModelDataParallelTopology",
    deepspeed__mpu="PipelineParallelGrid",
)
_VALUES = _names(
    zero__value_access="safe_get_full_fp32_param safe_get_full_optimizer_state safe_get_local_fp32_param "
    "safe_get_local_optimizer_state safe_set_full_fp32_param safe_set_full_optimizer_state",
    zero__gradients="safe_get_full_grad safe_get_local_grad",
    zero__edited_values="safe_set_full_grad safe_set_local_fp32_param safe_set_local_grad safe_set_local_optimizer_state "
    "safe_update_full_grad_vectorized",
)
_LEAVES = _names(
    zero__leaf_modules="get_z3_leaf_modules set_z3_leaf_modules set_z3_leaf_modules_by_name "
    "set_z3_leaf_modules_by_suffix unset_z3_leaf_modules z3_leaf_module",
)
_CONFIG = _names(deepspeed__entry="DeepSpeedConfig=parse_config", errors="DeepSpeedConfigError=ConfigError")
_COMM = _names(
    torch="ReduceOp is_initialized is_available new_group destroy_process_group broadcast broadcast_object_list all_gather "
    "all_gather_object all_gather_into_tensor reduce_scatter reduce_scatter_tensor all_reduce reduce gather scatter "
    "all_to_all all_to_all_single send recv isend irecv P2POp batch_isend_irecv barrier monitored_barrier get_world_size "
    "get_rank get_global_rank get_backend ProcessGroup allgather_fn=all_gather_into_tensor "
    "reduce_scatter_fn=reduce_scatter_tensor inference_all_reduce=all_reduce "
    "get_all_ranks_from_group=get_process_group_ranks",
    deepspeed__entry="init_distributed",
    deepspeed__helpers="get_local_rank get_world_group initialize_mesh_device log_summary mpi_discovery",
)
_ACCELERATOR = _names(deepspeed__accelerator="get_accelerator DeepSpeedAccelerator=Accelerator")
_GROUPS = _names(
    deepspeed__groups="get_data_parallel_group get_data_parallel_rank get_data_parallel_world_size "
    "get_model_parallel_group get_model_parallel_rank get_model_parallel_world_size "
    "get_tensor_model_parallel_group get_tensor_model_parallel_rank "
    "get_tensor_model_parallel_world_size get_tensor_model_parallel_src_rank "
    "_get_data_parallel_group=get_data_parallel_group _get_data_parallel_rank=get_data_parallel_rank "
    "_get_data_parallel_world_size=get_data_parallel_world_size "
    "_get_model_parallel_world_size=get_model_parallel_world_size "
    "_get_sequence_parallel_group=get_sequence_parallel_group _get_sequence_parallel_rank=get_sequence_parallel_rank "
    "_get_sequence_parallel_world_size=get_sequence_parallel_world_size "
    "_get_sequence_data_parallel_group=get_sequence_data_parallel_group "
    "_get_sequence_data_parallel_rank=get_sequence_data_parallel_rank "
    "_get_sequence_data_parallel_world_size=get_sequence_data_parallel_world_size "
    "_get_expert_parallel_group=get_expert_parallel_group _get_expert_parallel_rank=get_expert_parallel_rank "
    "_get_expert_parallel_world_size=get_expert_parallel_world_size "
    "_get_expert_data_parallel_group=get_expert_data_parallel_group "
    "_get_expert_data_parallel_rank=get_expert_data_parallel_rank "
    "_get_expert_data_parallel_world_size=get_expert_data_parallel_world_size "
    "_get_max_expert_size=get_expert_size _get_max_expert_size_name=get_expert_size_name "
    "_get_expert_model_parallel_world_size=one _get_broadcast_src_rank=get_broadcast_src_rank",
)
_SCHEDULES = _names(
    deepspeed__schedulers="WarmupLR WarmupDecayLR WarmupCosineLR OneCycle LRRangeTest VALID_LR_SCHEDULES WARMUP_LR "
    "WARMUP_DECAY_LR WARMUP_COSINE_LR ONE_CYCLE LR_RANGE_TEST WARMUP_LOG_RATE WARMUP_LINEAR_RATE WARMUP_MIN_LR "
    "WARMUP_MAX_LR WARMUP_NUM_STEPS WARMUP_TYPE WARMUP_MIN_RATIO COS_MIN_RATIO TOTAL_NUM_STEPS CYCLE_MIN_LR CYCLE_MAX_LR "
    "DECAY_LR_RATE CYCLE_FIRST_STEP_SIZE CYCLE_SECOND_STEP_SIZE CYCLE_FIRST_STAIR_COUNT CYCLE_SECOND_STAIR_COUNT "
    "DECAY_STEP_SIZE CYCLE_MIN_MOM CYCLE_MAX_MOM DECAY_MOM_RATE LR_RANGE_TEST_MIN_LR LR_RANGE_TEST_STEP_SIZE "
    "LR_RANGE_TEST_STEP_RATE LR_RANGE_TEST_STAIRCASE"
)
_SEQUENCES = _names(
    deepspeed__sequence_ranks="initialize_sequence_parallel get_sequence_parallel_group get_sequence_parallel_rank "
    "get_sequence_parallel_world_size get_data_parallel_rank get_data_parallel_world_size"
)
_HELPERS = _names(deepspeed__helpers="see_memory_usage set_random_seed move_to_device")
_TO_FP32 = _names(
    deepspeed__zero_to_fp32="get_fp32_state_dict_from_zero_checkpoint convert_zero_checkpoint_to_fp32_state_dict "
    "load_state_dict_from_zero_checkpoint"
)
_LOADER = _names(data="RepeatingLoader DeepSpeedDataLoader=EpochLoader")

SURFACE: dict[str, dict[str, str]] = {
    "deepspeed": {
        **_ENGINE,
        **_CONFIG,
        **_PIPE,
        **_LOADER,
        **_ACCELERATOR,
        **_names(
            deepspeed__entry="initialize init_distributed",
            deepspeed__tensor_ranks="tp_model_init",
            deepspeed__arguments="add_config_arguments",
            deepspeed__name_table="__version__=VERSION version=VERSION",
            deepspeed__helpers="log_dist OnDevice DeepSpeedOptimizer",
            engine__pipeline_engine="PipelineEngine",
            log="logger=script_logger",
        ),
    },
    "deepspeed.accelerator": _ACCELERATOR,
    "deepspeed.accelerator.real_accelerator": _ACCELERATOR,
    "deepspeed.accelerator.abstract_accelerator": _ACCELERATOR,
    "deepspeed.checkpoint": {},
    "deepspeed.checkpoint.utils": _names(deepspeed__helpers="clone_tensors_for_torch_save"),
    "deepspeed.checkpointing": _CHECKPOINTING,
    "deepspeed.comm": _COMM,
    "deepspeed.comm.comm": _COMM,
    "deepspeed.constants": _names(deepspeed__helpers="TORCH_DISTRIBUTED_DEFAULT_PORT CROSS_RANK CROSS_SIZE"),
    "deepspeed.git_version_info": _names(deepspeed__name_table="version=VERSION"),
    "deepspeed.launcher": {},
    "deepspeed.launcher.runner": _names(
        deepspeed__launcher_names="DEEPSPEED_ENVIRONMENT_NAME DLTS_HOSTFILE EXPORT_ENVS fetch_hostfile main "
        "parse_inclusion_exclusion"
    ),
    "deepspeed.module_inject": {},
    "deepspeed.module_inject.layers": _names(deepspeed__parameters="GatherReplacedLayerParams"),
    "deepspeed.moe": {},
    "deepspeed.moe.utils": _names(
        deepspeed__parameters="is_moe_param split_params_into_different_moe_groups_for_optimizer"
    ),
    "deepspeed.monitor": {},
    "deepspeed.monitor.comet": _names(deepspeed__single_monitors="CometMonitor"),
    "deepspeed.monitor.config": _names(config__schema="DeepSpeedMonitorConfig=Config"),
    "deepspeed.monitor.csv_monitor": _names(deepspeed__single_monitors="csvMonitor"),
    "deepspeed.monitor.monitor": {
        **_names(monitors__monitor="Monitor MonitorMaster=Monitor"),
        **_names(deepspeed__single_monitors="CometMonitor TensorBoardMonitor WandbMonitor csvMonitor"),
    },
    "deepspeed.monitor.tensorboard": _names(deepspeed__single_monitors="TensorBoardMonitor"),
    "deepspeed.monitor.wandb": _names(deepspeed__single_monitors="WandbMonitor"),
    "deepspeed.ops": _names(deepspeed__helpers="__compatible_ops__=COMPATIBLE_OPS"),
    "deepspeed.ops.adagrad": _names(deepspeed__kernel_names="DeepSpeedCPUAdagrad"),
    "deepspeed.ops.adam": _names(deepspeed__kernel_names="DeepSpeedCPUAdam FusedAdam"),
    "deepspeed.ops.adam.cpu_adam": _names(deepspeed__kernel_names="DeepSpeedCPUAdam"),
    "deepspeed.ops.adam.fused_adam": _names(deepspeed__kernel_names="FusedAdam"),
    "deepspeed.ops.aio": _names(deepspeed__helpers="AsyncIOBuilder"),
    "deepspeed.ops.lamb": _names(deepspeed__kernel_names="FusedLamb"),
    "deepspeed.ops.lion": _names(deepspeed__kernel_names="DeepSpeedCPULion FusedLion"),
    "deepspeed.pipe": _PIPE,
    "deepspeed.runtime": {},
    "deepspeed.runtime.activation_checkpointing": {},
    "deepspeed.runtime.activation_checkpointing.checkpointing": _CHECKPOINTING,
    "deepspeed.runtime.base_optimizer": _names(deepspeed__helpers="DeepSpeedOptimizer ZeROOptimizer=DeepSpeedOptimizer"),
    "deepspeed.runtime.bf16_optimizer": _names(deepspeed__optimizer_names="BF16_Optimizer"),
    "deepspeed.runtime.config": _CONFIG,
    "deepspeed.runtime.data_pipeline": {},
    "deepspeed.runtime.data_pipeline.curriculum_scheduler": _names(deepspeed__refused="CurriculumScheduler"),
    "deepspeed.runtime.dataloader": _LOADER,
    "deepspeed.runtime.engine": _ENGINE,
    "deepspeed.runtime.lr_schedules": _SCHEDULES,
    "deepspeed.runtime.pipe": _PIPE,
    "deepspeed.runtime.pipe.engine": {**_names(engine__pipeline_engine="PipelineEngine"), **_ENGINE},
    "deepspeed.runtime.pipe.module": _PIPE,
    "deepspeed.runtime.pipe.topology": _TOPOLOGY,
    "deepspeed.runtime.sequence_parallel": {},
    "deepspeed.runtime.sequence_parallel.parallel_state_sp": _SEQUENCES,
    "deepspeed.runtime.sequence_parallel.ulysses_sp": _names(
        deepspeed__sequence_ranks="UlyssesSPAttentionHF UlyssesSPDataLoaderAdapter", deepspeed__tiled_mlp="TiledMLP"
    ),
    "deepspeed.runtime.utils": _HELPERS,
    "deepspeed.runtime.zero": {**_INIT, **_STATUS, **_EXTERNAL},
    "deepspeed.runtime.zero.offload_config": _names(
        zero__offloaded_states="OffloadStateTypeEnum=StateKind", deepspeed__helpers="OffloadDeviceEnum"
    ),
    "deepspeed.runtime.zero.partition_parameters": {
        **_INIT,
        **_STATUS,
        **_EXTERNAL,
        **_names(deepspeed__helpers="zero_wrapper_for_fp_tensor_constructor"),
    },
    "deepspeed.runtime.zero.tiling": _names(zero__tiling="TiledLinear"),
    "deepspeed.runtime.zero.utils": _names(deepspeed__parameters="is_zero_param"),
    "deepspeed.utils": {**_LOG, **_VALUES, **_LEAVES, **_LOADER, **_names(deepspeed__helpers="OnDevice instrument_w_nvtx")},
    "deepspeed.utils.groups": _GROUPS,
    "deepspeed.utils.logging": _LOG,
    "deepspeed.utils.z3_leaf_module": _LEAVES,
    "deepspeed.utils.zero_to_fp32": _TO_FP32,
    "deepspeed.zero": {**_INIT, **_STATUS, **_EXTERNAL, **_names(zero__tiling="TiledLinear")},
}

# What zerorun does not do, by the beginning of the name: the reason, and what to do instead.
MISSING: dict[str, str] = {
    "deepspeed.autotuning": "zerorun does not search for a configuration. Remedy: estimate_memory().",
    "deepspeed.compression": "zerorun does not compress. Remedy: quantise or prune with torchao after training.",
    "deepspeed.compile": "DeepCompile is not needed: engine.compile() compiles block by block at every stage.",
    "deepspeed.elasticity": "zerorun's checkpoints load on any number of ranks. Remedy: drop it, and set batch sizes.",
    "deepspeed.inference": "zerorun trains. Remedy: engine.export() the model, and serve it elsewhere.",
    "deepspeed.init_inference": "zerorun trains. Remedy: engine.export() the model, and serve it elsewhere.",
    "deepspeed.DeepSpeedHybridEngine": "there is no engine for both training and serving. Remedy: engine.export().",
    "deepspeed.DeepSpeedEngine.allreduce_bucket": "reductions belong to backward. Remedy: torch.distributed.all_reduce().",
    "deepspeed.DeepSpeedEngine.buffered_allreduce_fallback": "step() sums what backward has left. Remedy: leave it out.",
    "deepspeed.DeepSpeedEngine.clip_fp32_gradients": "step() clips, by the norm over all ranks. Remedy: "
    '"gradient_clipping" in the file.',
    "deepspeed.DeepSpeedEngine.load_moe_state_dict": "experts are loaded with the rest. Remedy: engine.load_checkpoint().",
    "deepspeed.DeepSpeedEngine.register_compile_pass": "DeepCompile has no place here. Remedy: engine.compile().",
    "deepspeed.DeepSpeedEngine.set_custom_curriculum_learning_schedule": "data efficiency is not built. Remedy: choose "
    "in the dataset or its sampler what is learned when.",
    "deepspeed.DeepSpeedEngine.set_data_post_process_func": "data efficiency is not built. Remedy: pass a collate_fn.",
    "deepspeed.InferenceEngine": "zerorun trains. Remedy: engine.export() the model, and serve it elsewhere.",
    "deepspeed.DeepSpeedTransformerLayer": "there are no fused layers. Remedy: torch's layers, and engine.compile().",
    "deepspeed.linear": "there is no OptimizedLinear. Remedy: peft's LoRA with a quantised base, which zerorun shards.",
    "deepspeed.moe": "experts are those of the model, as transformers has them. Remedy: use the model's own layers, and "
    '"expert_parallel": {"enabled": true, "autoep_size": 4} in the file, which spreads them over ranks.',
    "deepspeed.module_inject": 'layers are not replaced. Remedy: "tensor_parallel": {"autotp_size": N} in the file, which '
    "divides them; zero.GatheredParameters(params), which has them whole in a block.",
    "deepspeed.nebula": "that service is not supported. Remedy: save_checkpoint() writes in the background by itself.",
    "deepspeed.ops.op_builder": "nothing is built op by op. Remedy: drop it; zerorun.ops has what it needs.",
    "deepspeed.ops.sparse_attention": "zerorun has no attention kernels. Remedy: torch's flex_attention.",
    "deepspeed.ops.transformer": "there are no fused layers. Remedy: torch's layers, and engine.compile().",
    "deepspeed.profiling": "Remedy: the section flops_profiler of the configuration, or torch.profiler.",
    "deepspeed.runtime.data_pipeline": "data efficiency is not built. Remedy: sample in the dataset or its sampler.",
    "deepspeed.runtime.domino": 'zerorun overlaps tensor parallelism by itself. Remedy: "tensor_parallel" in the file.',
    "deepspeed.runtime.fp16": 'loss scaling is the engine\'s. Remedy: "fp16" in the file, and engine.loss_scale.',
    "deepspeed.runtime.sequence_parallel": "the model divides sequences itself, with its own attention, and computes the "
    'loss in tiles. Remedy: "sequence_parallel_size" in the file; zerorun.ops.linear_cross_entropy for a loss of your own.',
    "deepspeed.runtime.zero.stage3": "the engine updates by itself. Remedy: engine.optimizer; "
    "zerorun.estimate_memory() for estimates of memory.",
    "deepspeed.runtime.zero.stage_1_and_2": "the engine updates by itself. Remedy: engine.optimizer; "
    "zerorun.estimate_memory() for estimates of memory.",
    "deepspeed.sequence": "the model divides sequences itself, with its own attention layers. Remedy: "
    '"sequence_parallel_size" in the file.',
    "deepspeed.utils.timer": 'Remedy: "wall_clock_breakdown" in the file, or torch.profiler.',
    "deepspeed.zero.MiCS_Init": 'Remedy: zero.Init(), and "zero_optimization": {"shard_degree": 8} in the file.',
}


def target_of(module: str, name: str) -> Any:
    """Import what ``module`` of DeepSpeed calls ``name``. Raises KeyError for a name that it has not."""
    path, _, inside = SURFACE[module][name].partition(":")
    return getattr(import_module(path), inside)


def missing_reason(name: str) -> str:
    """Say why ``name`` is not there, and what to do."""
    found = next((why for start, why in MISSING.items() if f"{name}.".startswith(f"{start}.")), None)
    why = found or (
        "It has the names that known programs use. Remedy: leave this one out, or run the program with DeepSpeed itself, "
        "without ZERORUN_AS_DEEPSPEED; and tell where zerorun's issues are kept which program needs it."
    )
    return f"{name} is not in zerorun, which stands for DeepSpeed in this process. {why}"
