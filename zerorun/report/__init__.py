"""``zerorun-report``: can this machine, or these hosts, train? Facts of every host, a live check, and a verdict.

| file         | what it does                                                                | runs                      |
|--------------|-----------------------------------------------------------------------------|---------------------------|
| cli          | the command                                                                 | where the user is         |
| collect      | asks every host for its facts and its clock                                 | where the user is         |
| host         | answers: one host's facts, from machine (no torch) and software (torch)     | on every host             |
| live         | has the launcher run the live check, and ends it when it hangs              | where the user is         |
| checks       | the live check's worker: exchanges (right results) and speed (how fast)     | once for every rank       |
| findings     | facts and measurements -> what is wrong, where, and what to try             | where the user is; pure   |
| page         | all of it on 80 columns                                                     | where the user is; pure   |

Whatever may hang (a driver, a remote shell, a collective) is in a process of its own with a limit in time.
"""
