"""Chats: from messages and tools to a prompt, and from an output's text to content and tool calls.

    messages, tools --template--> prompt --model--> text --parser--> content, calls

No HTTP in here. A model's template is a program that came with its weights: it runs in a process
of its own. All else is pure.
"""
