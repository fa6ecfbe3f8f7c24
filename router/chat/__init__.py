"""Chats: messages and tools become a prompt, and an output's text becomes content and tool calls.

    messages, tools --template--> prompt --model--> text --parser--> reasoning, content, calls

This package contains no HTTP code. A model's template is a program that comes with the weights, so
it runs in a process of its own (renderer.py), which templates.py and process.py control. All other
code is pure.
"""
