"""What data artifacts look like on disk: prompts, chats, responses, splits."""
