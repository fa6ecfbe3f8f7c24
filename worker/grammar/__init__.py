"""Structured output: which tokens a grammar lets a sequence produce next.

    event loop        GrammarCompiler --first grammar--> fork server    (llguidance, vocabulary)
                            |                                | fork
                            |<--CompiledGrammar-- one process per grammar  (compiles, follows)
    engine's thread   Matcher <--------masks---------------->|

    json_schema    JSON schema, checked and limited -> grammar for llguidance
    ebnf           GBNF -> grammar in Lark syntax
    vocabulary     llguidance's vocabulary

llguidance compiles lazily: the lexer's states are made when a mask needs them. A schema of three
properties is ready after 1 ms of CPU time, one of 40 after 2 ms; a mask over SmolLM2's 49,152
tokens takes 6 us at the median and 42 us at the 99th percentile (Zen 4). llguidance limits the
lexer's states and the work of one step, which does not bound the time of an ambiguous grammar:

    ((a{1,100}){1,100}){1,100}           compiles in 1 ms; the 28th token exceeds a limit after 2 ms
    root ::= root root | root root root  compiles in 1 ms; the 100th token takes 11 ms, the 200th 66
              | "a"

Each grammar is therefore followed in a process of its own, which also reads schemas. The kernel
ends a process when an operation has used up its CPU time, or the process its memory. The sequences
of that grammar then fail with the cause; nothing else is affected.
A fork takes 8 ms and a process 5 MiB.

The work for a step is done while the model computes: the next mask is made as soon as a token is
accepted, and is mostly there when the sampler asks for it.
"""
