"""``everlift verify``: whether an OpenAI endpoint keeps the streams of its clients intact."""
