"""Counterparts of other programs' flags, such as those of diffusers' examples, kohya's scripts and Meta's DiT."""

from collections.abc import Collection

# Our flags -> equivalent flags of other programs. If a key lists several of our flags, the first one that the running
# program has is suggested.
_OURS = {
    "--ckpt --pretrained": "checkpoint checkpoint_path ckpt_path",
    "--pretrained --ckpt": "base_model base_model_path model_id model_name_or_path model_path pretrained_model "
    "pretrained_model_name_or_path pretrained_model_path transformer_path",
    "--lr": "learning_rate base_lr",
    "--global_seed --seed": "seed random_seed manual_seed",
    "--image_size": "resolution height width size image_resolution img_size",
    "--mixed_precision": "dtype torch_dtype precision weight_dtype amp",
    "--load": "resume resume_from resume_from_checkpoint resume_checkpoint",
    "--batch_size": "train_batch_size per_device_train_batch_size per_gpu_batch_size micro_batch_size",
    "--epochs": "num_train_epochs max_train_epochs num_epochs max_epochs",
    "--output --outputs": "output_dir out_dir results_dir save_dir logging_dir",
    "--grad_accumulation": "gradient_accumulation gradient_accumulation_steps grad_accum accumulate_grad_batches",
    "--grad_checkpoint": "gradient_checkpointing activation_checkpointing enable_gradient_checkpointing",
    "--max_steps": "max_train_steps num_train_steps train_steps total_steps train_iters iterations",
    "--lora": "rank lora_rank network_dim network_rank network_module lora_weights lora_path lora_model_path",
    "--lora_alpha": "network_alpha alpha",
    "--data_path": "train_data_dir train_data instance_data_dir data_dir data_root dataset "
    "dataset_config dataset_name dataset_path",
    "--num_sampling_steps --sample_steps": "num_inference_steps inference_steps num_steps steps",
    "--cfg_scale --sample_cfg_scale": "guidance_scale guidance cfg",
    "--sample_prompts": "validation_prompt validation_prompts sample_prompt",
    "--sample_every": "validation_steps validation_epochs sample_every_n_steps sample_steps_interval",
    "--ckpt_every": "checkpointing_steps save_steps save_every save_every_n_steps save_interval",
    "--ckpt_keep": "checkpoints_total_limit save_total_limit",
    "--lr_schedule": "lr_scheduler lr_scheduler_type",
    "--warmup_steps": "lr_warmup_steps num_warmup_steps",
    "--weight_decay": "adam_weight_decay",
    "--grad_clip": "max_grad_norm gradient_clip_val clip_grad_norm",
    "--num_workers": "dataloader_num_workers max_data_loader_n_workers",
    "--log_to": "report_to log_with logger",
    "--log_every": "logging_steps log_interval",
    "--label_drop": "class_dropout_prob cfg_dropout caption_dropout_rate proportion_empty_prompts",
    "--enable_flashattn": "xformers enable_xformers_memory_efficient_attention use_flash_attn sdpa",
    "--num_samples": "num_images num_images_per_prompt num_videos n_samples",
    "--prompt": "text caption",
    "--sampler": "scheduler scheduler_type",
    "--bucket_tokens": "enable_bucket aspect_ratio_bucketing",
    "--caption_prefix": "trigger_word trigger instance_prompt class_prompt",
    "--caption_column": "text_column",
    "--file_column": "image_column video_column",
}
_NONE_HERE = {
    "cache_latents cache_latents_to_disk cache_text_encoder_outputs": "preprocess.py latents encodes once",
    "lora_scale lora_weight lora_strength": "the weight follows the LoRA: --lora RUN:0.8",
    "repeats num_repeats dataset_repeats": "--data_path A:2,B:1 weights several sources, and epochs repeat them",
    "optimizer optimizer_type": "the optimizer is AdamW",
    "save_every_n_epochs": "--ckpt_every counts steps",
    "center_crop": "pictures are cropped at their centre; --random_crop crops elsewhere",
    "use_ema ema": "averaged weights are always kept; --ema_decay sets how",
    "allow_tf32": "what stays in fp32 uses TF32 anyway",
    "num_gpus nproc_per_node num_processes": "torchrun --nproc_per_node starts a process a GPU",
}
_NAMES = {theirs: ours.split() for ours, several in _OURS.items() for theirs in several.split()}
_SENTENCES = {theirs: said for several, said in _NONE_HERE.items() for theirs in several.split()}


def counterpart(name: str, flags: Collection[str]) -> str | None:
    """Return advice for a flag of another program; None if the flag is unknown.

    name: the other program's flag, without dashes. flags: flags of the running program, such as ``--lr``.
    """
    known = [ours for ours in _NAMES.get(name, ()) if ours in flags]
    return f"here it is {known[0]}" if known else _SENTENCES.get(name)
