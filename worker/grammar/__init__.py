"""Structured output: what a grammar lets a sequence say next.

    event loop       GrammarCompiler --first grammar--> nursery        (xgrammar and the vocabulary)
                           |                               | fork
                           |<--CompiledGrammar-- one keeper a grammar  (compiles, follows sequences)
    engine's thread     Matcher <-------masks------------->|

xgrammar compiles and follows grammars in processes of their own, one a grammar, since neither its
work nor its memory has a bound that shows in the text. Over 32,000 tokens, on one core:

    ([a-z]{1,100} " "?){1,100}           compiles in 0.2 s; after 20 tokens a mask takes 2 s
    ((a{1,100}){1,100}){1,100}           compiles in 2 ms; a token takes over 20 s
    root ::= root root root | "a" | ""   compiles in 0.1 ms; the 60th token takes 170 ms, and so on
    800 rules that lead to two others    over 25 s to compile
    JSON of any sort                     compiles in 10 ms; masks take 2 to 200 us

It lets go of the GIL while it works, but it cannot be interrupted. A keeper can: the kernel ends it
when an operation has used up its CPU time, or the process its memory. The sequences of that grammar
fail then, with the cause; nothing else is touched. A fork takes 8 ms and a keeper 5 MiB.

What a keeper does for a step, it does while the model computes: the next mask is made as soon as a
token is accepted, and is mostly there when the sampler asks for it.
"""
