"""Names of keys in the job files of other trainers: torchtitan, transformers' TrainingArguments, axolotl, LLaMA-Factory, nanoGPT."""

from __future__ import annotations

from collections.abc import Mapping

_NAMES = {
    "model.hf": "base_model model_name model_name_or_path model_path model_id hf_assets_path pretrained_model_name_or_path model.name "
    "model.flavor model.path model.checkpoint model.weights model.id initial_load_path",
    "model.kind": "model.type model_type",
    "model.dim": "hidden_size n_embd d_model",
    "model.layers": "num_layers num_hidden_layers n_layer n_layers",
    "model.heads": "num_attention_heads num_heads n_head n_heads",
    "model.kv_heads": "num_key_value_heads n_kv_heads num_query_groups",
    "model.ffn": "intermediate_size ffn_hidden_size",
    "model.loss": "label_smoothing label_smoothing_factor z_loss",
    "model.lora": "adapter peft peft_config lora_config",
    "model.lora.rank": "lora_r lora_rank lora.rank r",
    "model.lora.alpha": "lora_alpha",
    "model.lora.dropout": "lora_dropout",
    "model.lora.targets": "lora_target_modules lora_target_linear target_modules",
    "data.corpus": "dataset dataset_path dataset_name data_path data_dir data_files train_file train_data train_data_path",
    "data.corpus (the files of one split)": "split dataset_split",
    "data.mixture": "datasets data_blend data_mixture",
    "data.eval": "eval_dataset eval_file test_datasets validation_file val_data eval_data",
    "data.heldout": "val_set_size validation_split eval_split test_size",
    "data.eval_samples": "eval_iters max_eval_samples",
    "data.column": "text_column dataset_text_field text_field text_key field",
    "data.tokenizer": "tokenizer_path tokenizer_name tokenizer_file tokenizer_config",
    "data.seq_len": "block_size context_length cutoff_len max_length max_seq_len max_seq_length model_max_length sequence_len seq_length "
    "sequence_length",
    "data.vocab": "vocab_size padded_vocab_size",
    "data.format": "data.type data_type ds_type",
    "data.format=chat": "chat_template prompt_template data.template train_on_inputs train_on_prompt assistant_only_loss "
    "completion_only_loss",
    "data.document_mask": "sample_packing packing reset_position_ids reset_attention_mask intra_document_masking",
    "train.steps": "max_iters max_steps num_train_steps total_steps train_iters training_steps num_steps iterations",
    "train.steps (`vescale-ray data inspect` tells the epochs)": "epochs max_epochs num_epochs num_train_epochs",
    "train.slot_batch": "batch_size local_batch_size micro_batch_size microbatch_size per_device_train_batch_size per_device_batch_size "
    "train_batch_size",
    "train.slots (sequences of a step are train.slots * train.slot_batch)": "global_batch_size gradient_accumulation "
    "gradient_accumulation_steps grad_accum grad_accum_steps accumulate_grad_batches",
    "train.optimizer": "optim optimizer_name optimizer_type optimizer.name optimizer.type",
    "train.optimizer_options": "optim_args optimizer_args",
    "train.lr": "learning_rate max_lr peak_lr base_lr",
    "train.schedule": "lr_scheduler lr_scheduler_type lr_schedule lr_decay_style scheduler scheduler_type",
    "train.warmup_steps": "warmup warmup_iters lr_warmup_steps lr_warmup_iters num_warmup_steps",
    "train.warmup_steps (a number of steps)": "warmup_ratio lr_warmup_fraction",
    "train.decay_steps (a number of steps)": "decay_ratio",
    "train.decay_steps": "lr_decay_iters lr_decay_steps num_decay_steps",
    "train.min_lr_ratio": "min_lr_factor min_lr_rate cosine_min_lr_ratio",
    "train.min_lr_ratio (a fraction of train.lr)": "min_lr lr_min",
    "train.betas": "adam_beta1 adam_beta2 beta1 beta2",
    "train.eps": "adam_epsilon adam_eps epsilon",
    "train.grad_clip": "clip_grad clip_grad_norm gradient_clipping gradient_clip_val max_grad_norm max_norm",
    "train.param_dtype": "bf16 fp16 dtype torch_dtype mixed_precision mixed_precision_param precision tf32",
    "train.reduce_dtype": "mixed_precision_reduce grad_reduce_dtype",
    "train.quantize": "fp8 float8 quantization",
    "train.sharding": "data_parallel_replicate_degree data_parallel_shard_degree dp_replicate dp_shard fsdp fsdp_config hsdp",
    "train.sharding.shard_group": "sharding.dp_shard sharding.data_parallel_shard_degree",
    "train.sharding.replicas": "sharding.dp_replicate sharding.data_parallel_replicate_degree",
    "train.zero_stage": "deepspeed sharding_strategy zero_optimization fsdp_sharding_strategy",
    "train.expert_parallel": "ep expert_parallel_degree expert_parallel_size expert_model_parallel_size",
    "train.offload": "cpu_offload fsdp_offload_params offload_params enable_cpu_offload",
    "train.activation_checkpointing": "activation_checkpoint.mode ac_mode gradient_checkpointing recompute recompute_granularity",
    "train.compile": "compile.enable torch_compile",
    "train.eval_every": "eval.every eval_freq eval_interval eval_steps eval_strategy evaluation_strategy val_check_interval "
    "validation.freq",
    "train.early_stop": "early_stopping early_stopping_patience",
    "train.early_stop.min_delta": "early_stopping_threshold early_stop.threshold",
    "train.profile": "enable_profiling profile_freq profiler profiling",
    "train.profile.step": "profile.start profile.start_step",
    "train.completions": "sample_prompts sample_every generate_every",
    "elastic.workers": "nproc_per_node num_gpus num_processes num_workers num_nodes nnodes world_size n_gpus elastic.gpus devices",
    "ray.gpus_per_worker": "ray.gpus ray.num_gpus",
    "checkpoint.dir": "checkpoint.folder checkpoint_dir ckpt_dir save_dir",
    "checkpoint.every": "checkpoint.interval checkpoint.steps ckpt_every save_every save_freq save_interval save_steps save_strategy",
    "checkpoint.keep_last": "checkpoint.keep keep_latest_k keep_last_n save_total_limit max_checkpoints",
    "checkpoint.keep_best": "load_best_model_at_end save_best",
    "checkpoint.keep_metric": "metric_for_best_model monitor",
    "checkpoint.resume": "auto_resume init_from resume_from resume_from_checkpoint",
    "run.name": "experiment experiment_name exp_name run_name job_name",
    "run.dir": "dump_folder logging_dir out_dir output_dir",
    "run.seed": "data_seed random_seed",
    "metrics.interval_s": "log_every log_freq log_interval logging_steps",
    "metrics.tensorboard": "enable_tensorboard",
    "metrics.wandb": "enable_wandb report_to use_wandb wandb wandb.mode wandb.project wandb_entity wandb_log wandb_mode wandb_name "
    "wandb_project wandb_run_name",
}

_ABSENT = {
    "there is no tensor, pipeline or context parallelism; train.sharding and train.expert_parallel arrange the workers": (
        "tp tp_size tensor_parallel tensor_parallel_degree tensor_parallel_size tensor_model_parallel_size "
        "pp pp_size pipeline_parallel pipeline_parallel_degree pipeline_parallel_size pipeline_model_parallel_size "
        "cp cp_size context_parallel context_parallel_degree context_parallel_size sequence_parallel"
    ),
    "the base of adapters is not quantized; leave it out": "load_in_4bit load_in_8bit quantization_bit bnb_4bit_compute_dtype",
    "code in a model's folder is not run; build such a model in a model.factory": "trust_remote_code",
    "transformers chooses the kernel of attention; leave it out": "attn_implementation flash_attention flash_attn use_flash_attention_2",
    "background threads read the data; leave it out": "data.num_workers dataloader.num_workers dataloader_num_workers "
    "dataset_num_proc num_proc streaming preprocessing_num_workers pin_memory dataloader_pin_memory prefetch_factor",
}

OURS = {name: ours for ours, names in _NAMES.items() for name in names.split()}
"""Keys of this project, by the names of other trainers' keys. A name with several meanings includes its section."""


ABSENT = {name: told for told, names in _ABSENT.items() for name in names.split()}
"""Sentences for keys of other trainers that have no counterpart here."""


def our_key(key: str) -> str | None:
    """Return the key of this project that means what ``key`` means in another trainer."""
    return _found(OURS, key)


def no_such_key(key: str) -> str | None:
    """Return the sentence for a key of another trainer that has no counterpart here."""
    return _found(ABSENT, key)


def _found(names: Mapping[str, str], key: str) -> str | None:
    section_and_name = ".".join(key.split(".")[-2:])
    return names.get(section_and_name) or names.get(key.rpartition(".")[2])
