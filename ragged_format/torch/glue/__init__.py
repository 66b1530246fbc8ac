"""Ways into other people's training loops: Hugging Face Trainer and accelerate, and TRL.

Modules here import nothing of those packages; they fit the interfaces that those expect.
"""
