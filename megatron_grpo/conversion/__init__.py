"""Hugging Face <-> Megatron: tables of typed rules used in both directions; torch and safetensors
only.
"""
