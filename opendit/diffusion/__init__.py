"""Objectives, samplers, guidance and keyed random numbers: functions over tensors, without any nn.Module."""
