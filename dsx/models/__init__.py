"""Splits a Hugging Face causal LM into pipeline stages and moves its weights in and out.

The only package that imports transformers' modelling code.
"""
