"""Structured output: which tokens a grammar lets a sequence produce next.

    event loop        GrammarCompiler --first grammar--> fork server    (llguidance, vocabulary)
                            |                                | fork
                            |<--CompiledGrammar-- one process per grammar  (compiles, follows)
    engine's thread   Matcher <--------masks---------------->|

    json_schema    JSON schema, checked and limited -> grammar for llguidance
    ebnf           GBNF -> grammar in Lark syntax
    vocabulary     llguidance's vocabulary

llguidance compiles lazily: the lexer's states are made when a mask needs them. A schema of three
properties is ready after 5 ms of CPU time, one of 40 after 30 ms; a mask over 49,152 tokens takes
15 to 35 us in the median. llguidance has limits of its own, for the lexer's states and for the work
of one step, but they do not bound the time of an ambiguous grammar:

    ((a{1,100}){1,100}){1,100}           compiles in 2 ms; the 30th token exceeds a limit after 8 ms
    root ::= root root | root root root  compiles in 1 ms; the 200th token takes 50 ms
              | "a"

Each grammar is therefore followed in a process of its own, which also reads schemas. The kernel
ends a process when an operation has used up its CPU time, or the process its memory. The sequences
of that grammar then fail with the cause; nothing else is affected.
A fork takes 8 ms and a process 5 MiB.

The work for a step is done while the model computes: the next mask is made as soon as a token is
accepted, and is mostly there when the sampler asks for it.
"""
