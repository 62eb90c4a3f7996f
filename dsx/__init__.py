"""dsx: pretrain large language models on several clusters joined by slow links."""

__version__ = "0.1.0"
