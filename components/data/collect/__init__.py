"""The steps that collect prompts, chats, corpora, workloads and recorded traffic."""
