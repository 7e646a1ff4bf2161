"""The engine in this process, without HTTP: its speed, what a step is made of, and that its tokens stay the same."""
