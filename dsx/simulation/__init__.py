"""Many clusters in one process: what a choice of outer settings costs, before it costs a cluster.

The outer engine, codecs, data order and inner training are those of the real run; only the pipeline
is missing (each cluster is one replica of a plain fp32 module) and the slow link is modelled.
"""
